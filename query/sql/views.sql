-- The one definition of path, live, superseded, settled and history. sync and every command read these views.
--
-- Standard SQL as far as it goes. Not standard: CREATE OR REPLACE, date_diff, and the types' names. What another
-- engine has to bring along are the tables of the schema `log`, filled from the files: folders, records, reached,
-- checkpoints, alerts, batches, gaps, damages, firsts, now, and the views log.points (every point, sealed or open),
-- log.points_before (at least those of the segments that others start from) and log.eval_rows.
--
-- Tokens are integers throughout. Two of them stand for the ends of the axis: -9223372036854775808 for below everything,
-- 9223372036854775807 for beyond everything. Every interval is (lo, hi]: open below, closed above.

-- ==== Where segments start and end ==================================================================================

-- Adoptions are numbered -1, -2, ... among the segments of their run; of several of one segment the last one counts.
CREATE OR REPLACE TABLE log.adoptions AS
SELECT run_id, adopts AS segment, step, tokens, from_run, from_segment, from_ckpt, fork_reason
FROM (
    SELECT *, row_number() OVER (PARTITION BY run_id, adopts ORDER BY segment) AS choice
    FROM log.records
    WHERE phase = 'adopt'
) a
WHERE choice = 1;

CREATE OR REPLACE TABLE log.starts AS
SELECT run_id, segment, start_step, start_tokens, start_time, from_run, from_segment, from_ckpt, fork_reason,
       from_run IS NULL OR from_segment IS NULL AS from_nowhere
FROM (
    SELECT r.run_id, r.segment, coalesce(a.step, r.step) AS start_step, coalesce(a.tokens, r.tokens) AS start_tokens,
           r.time AS start_time, coalesce(a.from_run, r.from_run) AS from_run,
           coalesce(a.from_segment, r.from_segment) AS from_segment,
           CASE WHEN a.run_id IS NULL THEN r.from_ckpt ELSE a.from_ckpt END AS from_ckpt,
           CASE WHEN a.run_id IS NULL THEN r.fork_reason ELSE a.fork_reason END AS fork_reason
    FROM log.records r
    LEFT JOIN log.adoptions a ON a.run_id = r.run_id AND a.segment = r.segment
    WHERE r.phase = 'start'
) s;

-- The folders that are lifetimes of processes, and not records of adoptions.
CREATE OR REPLACE TABLE log.lifetimes AS
SELECT run_id, segment
FROM log.folders
WHERE segment > 0;

CREATE OR REPLACE TABLE log.ends AS
SELECT run_id, segment, step AS end_step, tokens AS end_tokens, time AS end_time, exit, detail, dropped
FROM log.records
WHERE phase = 'end';

-- The head of a run is its highest segment. One whose start cannot be read is on no path.
CREATE OR REPLACE TABLE log.heads AS
SELECT h.run_id, h.segment, s.start_tokens, s.from_nowhere, coalesce(e.exit IN ('finished', 'abandoned'), false) AS closed
FROM (SELECT run_id, max(segment) AS segment FROM log.starts GROUP BY run_id) h
JOIN log.starts s ON s.run_id = h.run_id AND s.segment = h.segment
LEFT JOIN log.ends e ON e.run_id = h.run_id AND e.segment = h.segment;

-- ==== Paths =========================================================================================================

-- The path of every segment, as if it were the head: it owns (its start, infinity), the segment it starts from owns up to
-- that start, and so on, through other runs, to a segment that starts from nowhere. UNION, not UNION ALL: records that
-- point at each other in a circle, which only damage can bring about, come to an end.
CREATE OR REPLACE TABLE log.paths AS
WITH RECURSIVE walk (head_run, head_segment, run_id, segment, lo, hi) AS (
    SELECT run_id, segment, run_id, segment, start_tokens, 9223372036854775807
    FROM log.starts
    UNION
    SELECT w.head_run, w.head_segment, b.run_id, b.segment, b.start_tokens, least(w.hi, w.lo)
    FROM walk w
    JOIN log.starts s ON s.run_id = w.run_id AND s.segment = w.segment
    JOIN log.starts b ON b.run_id = s.from_run AND b.segment = s.from_segment
)
SELECT head_run, head_segment, run_id, segment, max(hi) AS hi
FROM walk
GROUP BY head_run, head_segment, run_id, segment;

-- ==== Live and superseded ===========================================================================================

-- For each segment, how far up each later head of its run still goes along it; below everything where it does not.
CREATE OR REPLACE TABLE log.cuts AS
WITH reach AS (
    SELECT s.run_id, s.segment, k.segment AS head_segment,
           coalesce(p.hi, -9223372036854775808) AS hi
    FROM log.starts s
    JOIN log.starts k ON k.run_id = s.run_id AND k.segment > s.segment
    LEFT JOIN log.paths p ON p.head_run = k.run_id AND p.head_segment = k.segment
                         AND p.run_id = s.run_id AND p.segment = s.segment
), lowest AS (
    SELECT run_id, segment, head_segment,
           min(hi) OVER (PARTITION BY run_id, segment ORDER BY head_segment) AS hi
    FROM reach
)
SELECT run_id, segment, head_segment, hi, before
FROM (
    SELECT run_id, segment, head_segment, hi,
           lag(hi, 1, 9223372036854775807) OVER (PARTITION BY run_id, segment ORDER BY head_segment) AS before
    FROM lowest
) falls
WHERE hi < before;

-- What each segment's tokens are, as intervals that do not overlap: live where superseded_by is null. `at_start` marks
-- the place a segment starts from: the segment before was there first, so a point there counts only where that one, or one
-- before it that ended there too, has none of the same metric.
CREATE OR REPLACE TABLE log.pieces AS
WITH own AS (
    SELECT s.run_id, s.segment, s.start_tokens, s.from_nowhere, s.from_segment, p.hi AS live_to,
           CASE WHEN s.from_nowhere THEN -9223372036854775808 ELSE s.start_tokens END AS lo
    FROM log.starts s
    JOIN log.heads h ON h.run_id = s.run_id
    LEFT JOIN log.paths p ON p.head_run = h.run_id AND p.head_segment = h.segment
                         AND p.run_id = s.run_id AND p.segment = s.segment
)
SELECT run_id, segment, lo, live_to AS hi, CAST(NULL AS BIGINT) AS superseded_by, false AS at_start
FROM own
WHERE live_to > lo
UNION ALL
SELECT o.run_id, o.segment, greatest(c.hi, o.lo, coalesce(o.live_to, o.lo)), c.before, c.head_segment, false
FROM own o
JOIN log.cuts c ON c.run_id = o.run_id AND c.segment = o.segment
WHERE c.before > greatest(c.hi, o.lo, coalesce(o.live_to, o.lo))
UNION ALL
SELECT o.run_id, o.segment, o.start_tokens - 1, o.start_tokens,
       CASE WHEN o.live_to IS NULL THEN (
           SELECT min(c.head_segment) FROM log.cuts c
           WHERE c.run_id = o.run_id AND c.segment = o.segment AND c.hi < o.start_tokens
       ) END, true
FROM own o
WHERE NOT o.from_nowhere
UNION ALL
-- Refused when logged; if they are there all the same, they are on no path, and the segment names itself.
SELECT run_id, segment, -9223372036854775808, start_tokens - 1, segment, false
FROM own
WHERE NOT from_nowhere
UNION ALL
-- A segment whose start cannot be read is on no path either.
SELECT f.run_id, f.segment, -9223372036854775808, 9223372036854775807,
       coalesce((SELECT min(k.segment) FROM log.starts k WHERE k.run_id = f.run_id AND k.segment > f.segment), f.segment), false
FROM log.lifetimes f
LEFT JOIN log.starts s ON s.run_id = f.run_id AND s.segment = f.segment
WHERE s.run_id IS NULL;

-- ==== Settled =======================================================================================================

-- H of each run: its newest live checkpoint, or the place its head starts from if that is higher.
CREATE OR REPLACE TABLE log.horizons AS
SELECT h.run_id, h.segment AS head_segment, h.start_tokens AS head_start,
       CASE WHEN h.closed THEN 9223372036854775807
            ELSE greatest(coalesce(max(c.tokens), -9223372036854775808),
                          CASE WHEN h.from_nowhere THEN -9223372036854775808 ELSE h.start_tokens END) END AS tokens
FROM log.heads h
LEFT JOIN (
    SELECT c.run_id, c.tokens
    FROM log.checkpoints c
    JOIN log.pieces p ON p.run_id = c.run_id AND p.segment = c.segment AND c.tokens > p.lo AND c.tokens <= p.hi
    WHERE p.superseded_by IS NULL
) c ON c.run_id = h.run_id
GROUP BY h.run_id, h.segment, h.start_tokens, h.from_nowhere, h.closed;

-- What a segment logs at its own start is left behind when a later one starts from the same checkpoint: it is settled
-- only once there is a checkpoint beyond, or when the segment ended with nothing to come.
CREATE OR REPLACE TABLE log.closings AS
SELECT DISTINCT run_id, segment
FROM log.ends
WHERE exit IN ('finished', 'abandoned');

CREATE OR REPLACE TABLE log.stretches AS
SELECT p.run_id, p.segment, p.lo, p.hi, p.superseded_by,
       CASE WHEN p.at_start AND h.tokens <= p.hi AND e.run_id IS NULL THEN p.hi - 1 ELSE h.tokens END AS settled_to,
       CASE WHEN p.at_start AND p.superseded_by IS NULL THEN s.from_segment END AS yields_to
FROM log.pieces p
LEFT JOIN log.horizons h ON h.run_id = p.run_id
LEFT JOIN log.starts s ON s.run_id = p.run_id AND s.segment = p.segment
LEFT JOIN log.closings e ON e.run_id = p.run_id AND e.segment = p.segment;

-- The curve of each run, through its parents: which run's segments it consists of, and which tokens of them.
CREATE OR REPLACE TABLE log.spans AS
WITH steps AS (
    SELECT h.run_id, p.run_id AS source_run, p.segment, s.start_tokens, s.from_nowhere, p.hi,
           p.run_id = h.run_id AND e.run_id IS NULL AS may_be_left,
           z.tokens AS settled_to
    FROM log.heads h
    JOIN log.horizons z ON z.run_id = h.run_id
    JOIN log.paths p ON p.head_run = h.run_id AND p.head_segment = h.segment
    JOIN log.starts s ON s.run_id = p.run_id AND s.segment = p.segment
    LEFT JOIN log.closings e ON e.run_id = p.run_id AND e.segment = p.segment
)
SELECT run_id, source_run, segment, hi, settled_to, false AS yields,
       CASE WHEN from_nowhere THEN -9223372036854775808 ELSE start_tokens END AS lo
FROM steps
UNION ALL
SELECT run_id, source_run, segment, start_tokens,
       CASE WHEN may_be_left AND settled_to <= start_tokens THEN start_tokens - 1 ELSE settled_to END,
       true, start_tokens - 1
FROM steps
WHERE NOT from_nowhere;

-- The segments that were at a segment's start before it: the one it starts from and, where that one ends where it starts,
-- the ones before. Only for segments that have points there, or may have: most have none, and then nothing is compared.
CREATE OR REPLACE TABLE log.befores AS
WITH RECURSIVE back (run_id, segment, tokens, before_run, before_segment) AS (
    SELECT s.run_id, s.segment, s.start_tokens, s.from_run, s.from_segment
    FROM log.starts s
    JOIN log.firsts f ON f.run_id = s.run_id AND f.segment = s.segment
    WHERE coalesce(f.tokens, s.start_tokens) <= s.start_tokens
      AND EXISTS (SELECT 1 FROM log.spans t WHERE t.source_run = s.run_id AND t.segment = s.segment AND t.yields)
    UNION
    SELECT b.run_id, b.segment, b.tokens, s.from_run, s.from_segment
    FROM back b
    JOIN log.starts s ON s.run_id = b.before_run AND s.segment = b.before_segment
    WHERE s.start_tokens = b.tokens AND NOT s.from_nowhere
)
SELECT b.run_id, b.segment, b.tokens, b.before_run, b.before_segment
FROM back b
JOIN log.lifetimes f ON f.run_id = b.before_run AND f.segment = b.before_segment;

-- How far each segment is known to have come: its end, or the furthest of heartbeat, last point and last checkpoint.
CREATE OR REPLACE TABLE log.progress AS
SELECT f.run_id, f.segment,
       coalesce(e.end_step, greatest(s.start_step, coalesce(r.step, s.start_step), coalesce(c.step, s.start_step)))
           AS last_step,
       coalesce(e.end_tokens,
                greatest(s.start_tokens, coalesce(r.tokens, s.start_tokens), coalesce(c.tokens, s.start_tokens)))
           AS last_tokens,
       coalesce(e.end_time, greatest(s.start_time, coalesce(r.time, s.start_time), coalesce(c.time, s.start_time)),
                r.time) AS last_time,
       coalesce(e.dropped, r.dropped) AS dropped
FROM log.lifetimes f
LEFT JOIN log.starts s ON s.run_id = f.run_id AND s.segment = f.segment
LEFT JOIN log.ends e ON e.run_id = f.run_id AND e.segment = f.segment
LEFT JOIN log.reached r ON r.run_id = f.run_id AND r.segment = f.segment
LEFT JOIN (
    SELECT run_id, segment, max(step) AS step, max(tokens) AS tokens, max(time) AS time
    FROM log.checkpoints
    GROUP BY run_id, segment
) c ON c.run_id = f.run_id AND c.segment = f.segment;

-- ==== Views: made once, over whatever the tables above hold =======================================================

-- The metrics of which an earlier segment has a point at the very place where this one starts.
CREATE OR REPLACE VIEW log.taken AS
SELECT DISTINCT b.run_id, b.segment, p.name
FROM log.befores b
JOIN log.points_before p ON p.run_id = b.before_run AND p.segment = b.before_segment AND p.tokens = b.tokens;

CREATE OR REPLACE VIEW metrics AS
SELECT p.run_id, p.segment, p.seq, p.time, p.step, p.tokens, p.name, p.value,
       CASE WHEN t.name IS NULL THEN s.superseded_by ELSE s.yields_to END AS superseded_by,
       s.superseded_by IS NULL AND t.name IS NULL AND p.tokens <= s.settled_to AS settled
FROM log.points p
JOIN log.stretches s ON s.run_id = p.run_id AND s.segment = p.segment AND p.tokens > s.lo AND p.tokens <= s.hi
LEFT JOIN log.taken t ON t.run_id = p.run_id AND t.segment = p.segment AND t.name = p.name AND s.yields_to IS NOT NULL;

CREATE OR REPLACE VIEW live AS
SELECT * FROM metrics WHERE superseded_by IS NULL;

CREATE OR REPLACE VIEW history AS
SELECT h.run_id, h.source_run, p.segment, p.seq, p.time, p.step, p.tokens, p.name, p.value,
       p.tokens <= h.settled_to AS settled
FROM log.points p
JOIN log.spans h ON h.source_run = p.run_id AND h.segment = p.segment AND p.tokens > h.lo AND p.tokens <= h.hi
LEFT JOIN log.taken t ON t.run_id = p.run_id AND t.segment = p.segment AND t.name = p.name AND h.yields
WHERE t.name IS NULL;

-- ==== Rare records ==================================================================================================

CREATE OR REPLACE VIEW checkpoints AS
SELECT c.*, s.superseded_by, s.superseded_by IS NULL AND c.tokens <= s.settled_to AS settled
FROM log.checkpoints c
JOIN log.stretches s ON s.run_id = c.run_id AND s.segment = c.segment AND c.tokens > s.lo AND c.tokens <= s.hi;

CREATE OR REPLACE VIEW alerts AS
SELECT a.*, s.superseded_by, s.superseded_by IS NULL AND a.tokens <= s.settled_to AS settled
FROM log.alerts a
JOIN log.stretches s ON s.run_id = a.run_id AND s.segment = a.segment AND a.tokens > s.lo AND a.tokens <= s.hi;

CREATE OR REPLACE VIEW batches AS
SELECT b.*, s.superseded_by, s.superseded_by IS NULL AND b.tokens <= s.settled_to AS settled
FROM log.batches b
JOIN log.stretches s ON s.run_id = b.run_id AND s.segment = b.segment AND b.tokens > s.lo AND b.tokens <= s.hi;

CREATE OR REPLACE VIEW gaps AS
SELECT * FROM log.gaps;

CREATE OR REPLACE VIEW damages AS
SELECT * FROM log.damages;

-- An eval is as live as its checkpoint; of several with one id, as the livest, its own run's first.
CREATE OR REPLACE VIEW evals AS
SELECT coalesce(c.run_id, e.run_id) AS run_id, c.segment, e.seq, e.time,
       coalesce(c.step, e.step) AS step, coalesce(c.tokens, e.tokens) AS tokens,
       e.ckpt_id, e.task, e.metric, e.value, e.stderr, e.harness, e.harness_version, e.prompt_hash, e.details,
       c.superseded_by, c.ckpt_id IS NOT NULL AS matched
FROM (
    SELECT f.*, c.run_id AS ckpt_run, c.segment AS ckpt_segment, c.seq AS ckpt_seq,
           row_number() OVER (
               PARTITION BY f.run_id, f.file, f.row_number
               ORDER BY CASE WHEN c.superseded_by IS NULL THEN 0 ELSE 1 END,
                        CASE WHEN c.run_id = f.run_id THEN 0 ELSE 1 END, c.run_id, c.segment DESC, c.seq
           ) AS choice
    FROM log.eval_rows f
    LEFT JOIN checkpoints c ON c.ckpt_id = f.ckpt_id
) e
LEFT JOIN checkpoints c ON c.run_id = e.ckpt_run AND c.segment = e.ckpt_segment AND c.seq = e.ckpt_seq
WHERE e.choice = 1;

-- ==== Segments and runs =============================================================================================

CREATE OR REPLACE VIEW segments AS
SELECT f.run_id, f.segment, s.start_step, s.start_tokens, e.end_step, e.end_tokens, s.start_time, e.end_time, e.exit, e.detail,
       g.dropped, g.last_step, g.last_tokens, g.last_time,
       r.project, r.run_name, s.from_run, s.from_segment, s.from_ckpt, s.fork_reason,
       r.recipe_hash, r.recipe, r.recipe_diff, r.config, r.git_commit, r.git_dirty, r.image_digest, r.nodes, r.world_size,
       r.host, r.pid, r.scheduler, r.flops, r.versions, r.alerts, s.run_id IS NOT NULL AS started
FROM log.lifetimes f
JOIN log.progress g ON g.run_id = f.run_id AND g.segment = f.segment
LEFT JOIN log.starts s ON s.run_id = f.run_id AND s.segment = f.segment
LEFT JOIN log.records r ON r.run_id = f.run_id AND r.segment = f.segment AND r.phase = 'start'
LEFT JOIN log.ends e ON e.run_id = f.run_id AND e.segment = f.segment;

-- The parent is where the run's path leaves the run.
CREATE OR REPLACE VIEW runs AS
SELECT f.run_id, s.project, s.run_name, b.from_run AS parent_run, b.fork_reason, b.start_tokens AS fork_tokens,
       CASE WHEN s.exit IS NOT NULL THEN s.exit
            WHEN s.last_time IS NULL OR s.last_time < n.lost_before THEN 'lost'
            WHEN s.last_time < n.stalled_before THEN 'stalled'
            ELSE 'running' END AS status,
       f.segments, f.first_time, f.last_time, s.last_step AS step, s.last_tokens AS tokens, s.recipe_hash
FROM (
    SELECT run_id, count(*) AS segments, min(start_time) AS first_time, max(last_time) AS last_time
    FROM segments
    GROUP BY run_id
) f
CROSS JOIN log.now n
LEFT JOIN log.heads h ON h.run_id = f.run_id
LEFT JOIN segments s ON s.run_id = h.run_id AND s.segment = h.segment
LEFT JOIN (
    SELECT s.run_id, s.from_run, s.fork_reason, s.start_tokens
    FROM segments s
    JOIN log.paths p ON p.run_id = s.run_id AND p.segment = s.segment
    JOIN log.heads h ON h.run_id = p.head_run AND h.segment = p.head_segment AND h.run_id = s.run_id
    WHERE s.from_run <> s.run_id
) b ON b.run_id = f.run_id;

-- What the time of each segment bought. A segment that made no tokens at all was for nothing, unless it is the head.
CREATE OR REPLACE VIEW goodput AS
SELECT run_id, segment, tokens_kept, tokens - tokens_kept AS tokens_superseded, running_s, waiting_s, gpu_hours,
       CASE WHEN tokens > 0 THEN gpu_hours * (tokens - tokens_kept) / tokens
            WHEN is_head THEN 0.0
            ELSE gpu_hours END AS gpu_hours_lost
FROM (
    SELECT s.run_id, s.segment, s.last_tokens - s.start_tokens AS tokens,
           coalesce(greatest(least(p.hi, s.last_tokens) - s.start_tokens, 0), 0) AS tokens_kept,
           date_diff('millisecond', s.start_time, s.last_time) / 1000.0 AS running_s,
           greatest(date_diff('millisecond',
               lag(s.last_time, 1, s.start_time) OVER (PARTITION BY s.run_id ORDER BY s.segment), s.start_time), 0)
               / 1000.0 AS waiting_s,
           s.world_size * date_diff('millisecond', s.start_time, s.last_time) / 3600000.0 AS gpu_hours,
           h.segment IS NOT NULL AS is_head
    FROM segments s
    LEFT JOIN log.heads h ON h.run_id = s.run_id AND h.segment = s.segment
    LEFT JOIN (
        SELECT p.run_id, p.segment, p.hi
        FROM log.paths p
        JOIN log.heads h ON h.run_id = p.head_run AND h.segment = p.head_segment AND h.run_id = p.run_id
    ) p ON p.run_id = s.run_id AND p.segment = s.segment
    WHERE s.started
) g;
