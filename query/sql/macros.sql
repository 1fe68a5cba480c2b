-- What people ask of curves again and again. Each macro reads the view `history`: what is live, parents included.

-- One metric of one run as a curve.
CREATE OR REPLACE MACRO series(run, metric) AS TABLE
SELECT tokens, step, time, value, source_run, segment, settled
FROM history
WHERE run_id = run AND name = metric
ORDER BY tokens, seq;

-- The exponentially weighted mean by tokens: a point's weight halves with each half_life_tokens that it lies behind,
--     smooth(i) = sum over j <= i of value(j) w(i, j) / sum over j <= i of w(i, j),  w(i, j) = 2 ^ -((tokens(i) - tokens(j)) / half_life_tokens)
-- Dividing by the sum of the weights is the correction of the bias towards the beginning (Kingma and Ba, "Adam", 2015,
-- section 3); for points at equal distances it is what TensorBoard calls smoothing. NaN and infinities have no weight.
--
-- No recursion: points are added up in blocks of 16 half-lives, relative to the begin of each, which keeps powers small. Of
-- the blocks before, four count: what lies further behind weighs less than 2 ^ -64, and a double cannot tell.
CREATE OR REPLACE MACRO smooth(run, metric, half_life_tokens) AS TABLE
WITH points AS (
    SELECT tokens, step, time, value, seq,
           (tokens - min(tokens) OVER ()) / CASE WHEN half_life_tokens > 0 THEN half_life_tokens
               ELSE error('smooth: half_life_tokens must be above 0') END AS age,
           CASE WHEN isfinite(value) THEN value ELSE 0.0 END AS finite, CASE WHEN isfinite(value) THEN 1.0 ELSE 0.0 END AS counts
    FROM history
    WHERE run_id = run AND name = metric
), weighted AS (
    SELECT *, CAST(floor(age / 16.0) AS BIGINT) AS block, counts * pow(2.0, age - 16.0 * floor(age / 16.0)) AS weight
    FROM points
), summed AS (
    SELECT *, sum(finite * weight) OVER upto AS total, sum(weight) OVER upto AS weights
    FROM weighted
    WINDOW upto AS (PARTITION BY block ORDER BY tokens, seq ROWS UNBOUNDED PRECEDING)
), blocks AS (
    SELECT block + behind AS block, sum(total * pow(2.0, -16.0 * behind)) AS total, sum(weights * pow(2.0, -16.0 * behind)) AS weights
    FROM (SELECT block, sum(finite * weight) AS total, sum(weight) AS weights FROM weighted GROUP BY block) b
    CROSS JOIN (VALUES (1), (2), (3), (4)) d (behind)
    GROUP BY 1
)
SELECT s.tokens, s.step, s.time, s.value,
       -- at a NaN: what it was at the point before
       last_value(CASE WHEN s.counts > 0 THEN (s.total + coalesce(b.total, 0.0)) / (s.weights + coalesce(b.weights, 0.0)) END
           IGNORE NULLS) OVER (ORDER BY s.tokens, s.seq ROWS UNBOUNDED PRECEDING) AS smooth
FROM summed s
LEFT JOIN blocks b ON b.block = s.block
ORDER BY s.tokens, s.seq;

-- A curve in n pieces of equal width in tokens, for a coarse look at many points: a spike stays in min or max, a NaN in
-- `nonfinite`. Pieces without a point are left out.
CREATE OR REPLACE MACRO bucket(run, metric, n) AS TABLE
SELECT bucket, min(tokens) AS first_tokens, max(tokens) AS last_tokens, count(*) AS points,
       min(number) AS min, max(number) AS max,
       avg(value) FILTER (WHERE isfinite(value)) AS mean, arg_max(value, (tokens, seq)) AS last,
       count(*) FILTER (WHERE NOT isfinite(value)) AS nonfinite
FROM (
    SELECT tokens, seq, value, CASE WHEN NOT isnan(value) THEN value END AS number,
           CAST(CAST(tokens - min(tokens) OVER () AS HUGEINT) * CASE WHEN n >= 1 THEN n ELSE error('bucket: n must be 1 or more') END
               // (max(tokens) OVER () - min(tokens) OVER () + 1) AS BIGINT) AS bucket
    FROM history
    WHERE run_id = run AND name = metric
) p
GROUP BY bucket
ORDER BY bucket;

-- Where every run stood at the same number of tokens: its last point of the metric at or below t. `tokens` says where that
-- is: a run that has not come so far is there with its last point.
CREATE OR REPLACE MACRO at_tokens(metric, t) AS TABLE
SELECT run_id, last.tokens AS tokens, last.step AS step, last.time AS time, last.value AS value,
       last.source_run AS source_run, last.segment AS segment
FROM (
    SELECT run_id, arg_max({'tokens': tokens, 'step': step, 'time': time, 'value': value, 'source_run': source_run,
                            'segment': segment}, (tokens, seq)) AS last
    FROM history
    WHERE name = metric AND tokens <= t
    GROUP BY run_id
) p
ORDER BY run_id;

-- One row for each place of a run that has points, with all of them: metrics['train/loss'].
CREATE OR REPLACE MACRO wide(run) AS TABLE
SELECT tokens, step, max(time) AS time, map_from_entries(list((name, value) ORDER BY name)) AS metrics
FROM (
    SELECT tokens, step, name, max(time) AS time, arg_max(value, seq) AS value
    FROM history
    WHERE run_id = run
    GROUP BY tokens, step, name
) p
GROUP BY tokens, step
ORDER BY tokens, step;
