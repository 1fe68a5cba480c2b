// Curves as numbers: unpacked, smoothed, put on one axis. Nothing here knows of a page.

// Running sums of differences: coordinates grow slowly, and small numbers pack well.
function unpackSums(differences) {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
}

const ODD = { nan: NaN, inf: Infinity, "-inf": -Infinity };

// A line as the page holds it: columns of equal length, and which segment each point was logged by.
function unpackLine(packed) {
  return {
    run: packed.run,
    by: packed.by, // the segment that superseded it, or null
    tokens: unpackSums(packed.tokens),
    step: unpackSums(packed.step),
    time: unpackSums(packed.time), // ms since 1970
    value: packed.value.map((value) => (typeof value === "string" ? ODD[value] : value)),
    settled: packed.settled, // how many of the points, from the first on, no restart can take back
    pieces: packed.pieces, // [points, run, segment]
    stretches: packed.stretches, // [points kept, numbers, mean]; null: every point is here
    count: packed.count,
    label: packed.label, // of an evaluation: what is said of each point
  };
}

function pieceOf(line, index) {
  let end = 0;
  for (const [points, run, segment] of line.pieces) {
    end += points;
    if (index < end) return { run, segment };
  }
  return { run: null, segment: null };
}

const HOUR_MS = 3600e3;

// Where the points of a line lie on an axis, and in which order they lie there.
function placesOf(line, axis, run) {
  const xs =
    axis === "elapsed" ? line.time.map((time) => (time - run.first_time) / HOUR_MS) : line[axis];
  const order = xs.map((_, index) => index);
  if (xs.some((x, index) => index > 0 && x < xs[index - 1])) order.sort((a, b) => xs[a] - xs[b] || a - b);
  return { xs, order };
}

// Exponentially weighted mean by tokens, without the pull towards zero at its beginning: the weight of a point halves with each
// half-life that it lies behind, as the SQL macro `smooth` has it. Of a line that was thinned out the means of its stretches are
// averaged, weighed by how many points they stand for.
function smooth(line, halfLife) {
  const result = new Array(line.value.length).fill(null);
  let sum = 0;
  let weight = 0;
  let before = null;
  const take = (index, mean, count) => {
    const decay = before === null ? 0 : 2 ** (-(line.tokens[index] - before) / halfLife);
    sum = sum * decay + mean * count;
    weight = weight * decay + count;
    before = line.tokens[index];
    result[index] = sum / weight;
  };
  if (line.stretches === null) {
    line.value.forEach((value, index) => Number.isFinite(value) && take(index, value, 1));
    return result;
  }
  let end = 0;
  for (const [kept, count, mean] of line.stretches) {
    end += kept;
    if (kept > 0 && count > 0 && mean !== null) take(end - 1, mean, count);
  }
  return result;
}

// One column of places for lines that have their own each, as the charts want it. A place that a line has twice stays twice.
function align(lines) {
  const heads = lines.map(() => 0);
  const all = [];
  const merged = [];
  lines.forEach(({ xs }, index) => xs.forEach((x) => merged.push([x, index])));
  merged.sort((a, b) => a[0] - b[0]);
  const columns = lines.map(() => []);
  for (let at = 0; at < merged.length; ) {
    let end = at;
    const counts = new Map();
    while (end < merged.length && merged[end][0] === merged[at][0]) {
      counts.set(merged[end][1], (counts.get(merged[end][1]) ?? 0) + 1);
      end += 1;
    }
    const rows = Math.max(...counts.values());
    for (let row = 0; row < rows; row += 1) {
      const place = all.length;
      all.push(merged[at][0]);
      for (const [index, count] of counts) {
        if (row < count) {
          columns[index][place] = lines[index].ys[heads[index]];
          heads[index] += 1;
        }
      }
    }
    at = end;
  }
  columns.forEach((column) => (column.length = all.length));
  return { xs: all, columns: columns.map((column) => widenBreaks(Array.from(column))) };
}

// undefined: the line has no point here and goes on; null: it has one that cannot be drawn, and breaks. A break reaches from
// the point before to the point after, whatever points other lines have between them.
function widenBreaks(column) {
  for (const [first, end, by] of [[0, column.length, 1], [column.length - 1, -1, -1]]) {
    let isBroken = false;
    for (let place = first; place !== end; place += by) {
      if (column[place] === null) isBroken = true;
      else if (column[place] !== undefined) isBroken = false;
      else if (isBroken) column[place] = null;
    }
  }
  return column;
}

// Tokens, or another coordinate, of a place that is given in tokens, from the nearest points of a run's segment.
function placeOfTokens(lines, tokens, axis, run) {
  if (axis === "tokens") return tokens;
  let best = null;
  for (const line of lines) {
    for (let index = 0; index < line.tokens.length; index += 1) {
      const distance = Math.abs(line.tokens[index] - tokens);
      if (best === null || distance < best.distance) best = { distance, line, index };
    }
  }
  if (best === null) return null;
  const at = best.line[axis === "elapsed" ? "time" : axis][best.index];
  return axis === "elapsed" ? (at - run.first_time) / HOUR_MS : at;
}

const UNITS = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "k"],
];

function short(count, digits = 4) {
  for (const [size, unit] of UNITS) if (Math.abs(count) >= size) return `${+(count / size).toPrecision(digits)}${unit}`;
  return String(+count.toPrecision(digits));
}

// How many digits labels between two ends need beyond those that are usual, so that they can be told apart.
function moreDigits(first, last) {
  const span = Math.abs(last - first);
  const far = Math.max(Math.abs(first), Math.abs(last));
  return span > 0 && far < Infinity ? Math.min(Math.max(Math.floor(Math.log10(far / span)), 0), 12) : 0;
}

function moreDigitsOf(places) {
  const known = places.filter((place) => place !== null);
  return known.length > 1 ? moreDigits(known[0], known[known.length - 1]) : 0;
}

// Digits in groups of three; what JavaScript cannot count exactly is said to be rounded.
function whole(count) {
  return (Math.abs(count) > Number.MAX_SAFE_INTEGER ? "≈ " : "") + count.toLocaleString("en-US");
}

function utc(ms) {
  const time = new Date(ms);
  return Number.isNaN(time.getTime()) ? String(ms) : `${time.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

function valueText(value) {
  return Number.isNaN(value) ? "NaN" : value === Infinity ? "+Inf" : value === -Infinity ? "−Inf" : String(value);
}
