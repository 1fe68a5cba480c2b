// One chart: the curves of one metric, what is marked on them, and what is said under the pointer.

const LOG_AXIS = { splits: (_, __, low, high) => logTicks(low, high), filter: (_, places) => places };
const HOVER_PX = 40; // a point farther from the pointer, sideways, is not spoken of
const MARK_PX = 7;
const CLOSE_PX = 4; // borders of segments nearer to each other than this are drawn as one
const SPIKE_PX = 4;
const MOST_POINTS = 2000; // that are looked at under the pointer
const SHOWN_LINES = 8;
const SHOWN_MARKS = 4; // more would lie over the curve that they are marks of
const LINE_WIDTH = 1.6;
const CLIPPED_PART = 0.005; // of the values, at either end, that "clip spikes" leaves outside

class Panel {
  constructor(page, spec, figure) {
    this.page = page;
    this.spec = spec;
    this.figure = figure;
    this.frame = figure.querySelector(".frame");
    this.note = figure.querySelector(".note");
    this.lines = null;
    this.chart = null;
    this.entries = [];
    this.at = null; // the point that the keyboard stands on: [entry, place]
    figure.querySelectorAll("button[data-do]").forEach((button) => {
      button.addEventListener("click", () => this.act(button.dataset.do));
    });
    this.frame.addEventListener("keydown", (event) => this.onKey(event));
    this.frame.addEventListener("blur", () => this.leave());
    this.onTouches();
  }

  // Making and unmaking: only what is near the window is drawn.

  build() {
    this.destroy();
    this.lines ??= this.spec.lines.map(unpackLine);
    const { state } = this.page;
    this.entries = this.makeEntries();
    const shown = this.entries.filter((entry) => entry.xs.length > 0);
    this.entries = shown;
    this.sayWhatIsMissing();
    const { xs, columns } = align(shown.map((entry) => entry.drawn));
    const colours = this.page.colours;
    const options = {
      width: this.width(),
      height: this.height(),
      ms: 1,
      tzDate: (ms) => uPlot.tzDate(new Date(ms), "Etc/UTC"),
      legend: { show: false },
      scales: {
        x: { time: state.axis === "time", distr: this.page.isLogX() ? 3 : 1, range: () => this.page.range() },
        y: { distr: state.logy ? 3 : 1, range: (_, low, high) => this.rangeY(low, high) },
      },
      cursor: {
        drag: { x: true, y: true, uni: 24, dist: 6, setScale: false },
        points: { show: false },
        bind: { dblclick: () => () => this.page.zoom(null) },
      },
      axes: [this.axisX(colours), this.axisY(colours)],
      series: [{}, ...shown.map((entry) => entry.look)],
      hooks: {
        drawClear: [(chart) => this.drawBehind(chart)],
        draw: [(chart) => this.drawMarks(chart)],
        setCursor: [(chart) => this.onCursor(chart)],
        setSelect: [(chart) => this.onSelect(chart)],
      },
    };
    this.chart = new uPlot(options, [xs, ...columns], this.frame);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.frame.append(this.tip);
    this.figure.dataset.curves = String(shown.length);
  }

  destroy() {
    this.chart?.destroy();
    this.chart = null;
    this.tip?.remove();
  }

  resize() {
    this.chart?.setSize({ width: this.width(), height: this.height() });
  }

  width() {
    return Math.max(240, Math.floor(this.frame.clientWidth));
  }

  height() {
    const wide = this.figure.classList.contains("wide");
    return wide ? Math.max(260, Math.min(440, Math.round(window.innerHeight * 0.46))) : 220;
  }

  // What is drawn

  makeEntries() {
    const { state, runs, colours } = this.page;
    const entries = [];
    const halfLife = state.smoothing * this.page.tokensSpan();
    for (const line of this.lines) {
      const run = runs[line.run];
      if (state.hidden.has(line.run) || (line.by !== null && !state.superseded)) continue;
      const { xs, order } = placesOf(line, state.axis, run);
      const isPale = line.by !== null;
      const colour = isPale ? colours.superseded(line.run, runs.length) : colours.run(line.run);
      const own = this.ownPoints(line);
      const add = (values, look, isRaw) => {
        const kept = order.filter((id) => !(this.page.isLogX() && xs[id] <= 0) && values[id] !== null && own(id));
        const points = { xs: kept.map((id) => xs[id]), ys: kept.map((id) => this.drawable(values[id])), ids: kept };
        entries.push({
          line,
          isRaw,
          ...points,
          drawn: this.withBreaks(points, line, run),
          look: { spanGaps: false, points: { size: 5, stroke: colour, fill: colour }, ...look },
        });
      };
      const isSmoothed = halfLife > 0 && this.spec.kind === "metric";
      const dash = isPale ? [4, 3] : run.dash;
      add(line.value, { stroke: isSmoothed ? colours.faint(colour) : colour, width: isSmoothed ? 1 : LINE_WIDTH, dash }, true);
      if (this.spec.kind === "eval") entries.at(-1).look.points = { show: true, size: 7, stroke: colour, fill: colour };
      else if (isSmoothed) entries.at(-1).look.points = { show: false };
      if (isSmoothed) {
        add(smooth(line, halfLife), { stroke: colour, width: LINE_WIDTH + 0.4, dash, points: { show: false } }, false);
      }
    }
    // What is current lies over what is not.
    return entries.sort((a, b) => (a.line.by === null) - (b.line.by === null) || a.isRaw < b.isRaw);
  }

  shownBeside(own) {
    const { runs, state } = this.page;
    return new Set(runs.filter((_, index) => index !== own && !state.hidden.has(index)).map((run) => run.id));
  }

  // What a run took over from one that is shown itself is drawn once, but for the point that the two have in common.
  ownPoints(line) {
    const shown = this.shownBeside(line.run);
    let first = 0;
    for (const [points, source] of line.pieces) {
      if (!shown.has(source)) break;
      first += points;
    }
    return (id) => id >= first - 1 || first === 0;
  }

  // A line breaks where rows are known to be missing between two of its points and, by time, where nobody trained.
  withBreaks({ xs, ys, ids }, line, run) {
    const gaps = run.gaps.filter((gap) => line.pieces.some(([, source, segment]) => source === gap.run && segment === gap.segment));
    const isTime = ["time", "elapsed"].includes(this.page.state.axis);
    if (this.spec.kind === "eval" || !(gaps.length || (isTime && line.pieces.length > 1))) return { xs, ys };
    let [end, piece] = [line.pieces[0][0], 0];
    const drawn = { xs: [], ys: [] };
    ids.forEach((id, place) => {
      if (place > 0) {
        const [before, after] = [line.tokens[ids[place - 1]], line.tokens[id]];
        let isOther = false;
        for (; id >= end && piece + 1 < line.pieces.length; isOther = true) end += line.pieces[(piece += 1)][0];
        if ((isTime && isOther) || gaps.some((gap) => before <= gap.first && after >= gap.last && after > before)) {
          drawn.xs.push((xs[place - 1] + xs[place]) / 2);
          drawn.ys.push(null);
        }
      }
      drawn.xs.push(xs[place]);
      drawn.ys.push(ys[place]);
    });
    return drawn;
  }

  drawable(value) {
    return Number.isFinite(value) && (value > 0 || !this.page.state.logy) ? value : null;
  }

  rangeY(low, high) {
    if (low === null || low === undefined) return [this.page.state.logy ? 0.1 : 0, 1];
    if (this.page.state.clip) [low, high] = this.withoutSpikes(low, high);
    if (this.page.state.logy) {
      const room = Math.max((high / low) ** 0.05, 1.02);
      return [low / room, high * room];
    }
    const room = (high / 2 - low / 2) * 0.12 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  withoutSpikes(low, high) {
    const [first, last] = this.page.range();
    const values = [];
    for (const { xs, ys } of this.entries) {
      xs.forEach((x, index) => x >= first && x <= last && ys[index] !== null && values.push(ys[index]));
    }
    if (values.length < 20) return [low, high];
    values.sort((a, b) => a - b);
    const cut = Math.floor(values.length * CLIPPED_PART);
    return [values[cut], values[values.length - 1 - cut]];
  }

  axisX(colours) {
    const { axis } = this.page.state;
    const look = {
      stroke: () => colours.ink(),
      grid: { stroke: () => colours.grid(), width: 1 },
      ticks: { stroke: () => colours.grid(), width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
      space: 64,
      size: 30,
    };
    if (this.page.isLogX()) Object.assign(look, LOG_AXIS);
    if (axis === "time") {
      look.size = 44;
      look.values = (_, places) => timeLabels(places);
    } else {
      const unit = axis === "elapsed" ? " h" : "";
      look.space = (_, index, first, last) => 64 + 8 * moreDigits(first, last);
      look.values = (_, places) => {
        const digits = 4 + moreDigitsOf(places);
        return places.map((x) => (x === null ? "" : short(x, digits) + unit));
      };
    }
    return look;
  }

  axisY(colours) {
    const look = {
      stroke: () => colours.ink(),
      grid: { stroke: () => colours.grid(), width: 1 },
      ticks: { stroke: () => colours.grid(), width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
      size: (_, labels) => Math.max(62, 16 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length))),
      values: (_, places) => {
        const more = moreDigitsOf(places);
        return places.map((y) => (y === null ? "" : tick(y, more)));
      },
    };
    Object.assign(look, this.page.state.logy ? LOG_AXIS : ANY_AXIS);
    return look;
  }

  sayWhatIsMissing() {
    const notes = [];
    const visible = this.lines.filter((line) => !this.page.state.hidden.has(line.run));
    const odd = visible.reduce((sum, line) => sum + line.value.filter((value) => !Number.isFinite(value)).length, 0);
    if (odd) notes.push(`✗ NaN or infinite, at the places marked`);
    if (this.page.state.logy) {
      const low = visible.reduce((sum, line) => sum + line.value.filter((value) => value <= 0).length, 0);
      if (low) notes.push(`points that are not positive are not on this axis`);
    }
    if (this.page.isLogX() && visible.some((line) => line[this.page.state.axis]?.[0] <= 0)) {
      notes.push("what lies at 0 is not on this axis");
    }
    if (!this.entries.some((entry) => entry.ys.some((y) => y !== null))) notes.push("nothing to draw");
    this.note.textContent = notes.join(" · ");
  }

  // Marks

  marks() {
    const { state, runs } = this.page;
    const marks = { borders: [], alerts: [], bands: [], checkpoints: [], odd: [], best: [], left: [] };
    runs.forEach((run, index) => {
      if (state.hidden.has(index)) return;
      const shown = this.shownBeside(index); // what such a run has is marked as its own
      const lines = this.lines.filter((line) => line.run === index);
      const x = (mark) => (state.axis === "elapsed" ? (mark.time - run.first_time) / HOUR_MS : mark[state.axis]);
      if (state.segments) run.borders.forEach((border) => marks.borders.push({ x: x(border), text: border.text, flag: border.flag }));
      if (state.alerts) {
        for (const alert of run.alerts) {
          if ((alert.by !== null && !state.superseded) || shown.has(alert.from)) continue;
          marks.alerts.push({ x: x(alert), text: alert.text, isOwn: alert.metric === this.spec.name, isPale: alert.by !== null });
        }
      }
      for (const gap of run.gaps) {
        const own = lines.filter((line) => line.pieces.some(([, source, segment]) => source === gap.run && segment === gap.segment));
        const ends = [gap.first, gap.last].map((tokens) => placeOfTokens(own.length ? own : lines, tokens, state.axis, run));
        if (ends[0] !== null) marks.bands.push({ first: ends[0], last: ends[1], text: gap.text, isDamage: gap.damage });
      }
      if (state.checkpoints) {
        for (const saved of run.checkpoints) if (!shown.has(saved.from)) marks.checkpoints.push({ x: x(saved), text: saved.text });
      }
    });
    marks.borders.sort((a, b) => a.x - b.x);
    for (const entry of this.entries) {
      if (!entry.isRaw) continue;
      if (entry.line.by !== null) marks.left.push({ first: entry.xs[0], last: entry.xs.at(-1) });
      entry.ids.forEach((id, place) => {
        const value = entry.line.value[id];
        if (!Number.isFinite(value)) marks.odd.push({ x: entry.xs[place], value });
        if (entry.line.label?.[id]?.best) marks.best.push({ x: entry.xs[place], y: entry.ys[place] });
      });
    }
    return marks;
  }

  drawBehind(chart) {
    const { ctx, bbox } = chart;
    this.marked = this.marks();
    ctx.save();
    clip(ctx, bbox);
    for (const band of this.marked.bands) {
      const left = chart.valToPos(band.first, "x", true);
      const right = Math.max(chart.valToPos(band.last, "x", true), left + 3 * devicePixelRatio);
      ctx.fillStyle = band.isDamage ? this.page.colours.damage() : this.page.colours.gap();
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    // A run that resumed exactly draws over what it left behind: the foot of the chart shows where that is.
    ctx.fillStyle = this.page.colours.left();
    for (const stretch of this.marked.left) {
      const left = chart.valToPos(stretch.first, "x", true);
      const right = Math.max(chart.valToPos(stretch.last, "x", true), left + 2 * devicePixelRatio);
      ctx.fillRect(left, bbox.top + bbox.height - 7 * devicePixelRatio, right - left, 7 * devicePixelRatio);
    }
    ctx.restore();
  }

  drawMarks(chart) {
    const { ctx, bbox } = chart;
    const { colours } = this.page;
    const unit = devicePixelRatio;
    const at = (x) => Math.round(chart.valToPos(x, "x", true)) + 0.5;
    ctx.save();
    clip(ctx, bbox);
    ctx.font = `${11 * unit}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    let labelled = -Infinity;
    let before = -Infinity;
    for (const border of this.marked.borders) {
      const x = at(border.x);
      if (x - before < CLOSE_PX * unit) continue; // ninety restarts would hide the curve
      before = x;
      stroke(ctx, colours.border(), unit, [3 * unit, 3 * unit], x, bbox.top, x, bbox.top + bbox.height);
      if (x > labelled) {
        ctx.fillStyle = colours.ink();
        ctx.fillText(border.flag, x + 3 * unit, bbox.top + 2 * unit);
        labelled = x + ctx.measureText(border.flag).width + 6 * unit;
      }
    }
    ctx.fillStyle = colours.border();
    for (const saved of this.marked.checkpoints) ctx.fillRect(at(saved.x) - unit, bbox.top + bbox.height - 6 * unit, 2 * unit, 6 * unit);
    for (const alert of this.marked.alerts) {
      const x = at(alert.x);
      const colour = alert.isPale ? colours.border() : colours.alert();
      if (alert.isOwn) stroke(ctx, colour, unit, [2 * unit, 4 * unit], x, bbox.top, x, bbox.top + bbox.height);
      triangle(ctx, colour, x, bbox.top + bbox.height, 6 * unit);
    }
    for (const odd of this.marked.odd) {
      const y = odd.value === -Infinity ? bbox.top + bbox.height - 16 * unit : bbox.top + 22 * unit;
      cross(ctx, colours.alert(), at(odd.x), y, 4 * unit, unit);
    }
    for (const best of this.marked.best) star(ctx, colours.best(), at(best.x), chart.valToPos(best.y, "y", true), 8 * unit);
    ctx.restore();
  }

  // Under the pointer

  onCursor(chart) {
    const { left, top } = chart.cursor;
    if (left === null || left < 0 || !this.tip) return this.hideTip();
    this.showTip(chart.posToVal(left, "x"), left, top);
    if (!this.isEcho) this.page.echo(this, chart.posToVal(left, "x"));
    return undefined;
  }

  showTip(x, left, top) {
    const found = this.near(x, left, top);
    const marks = this.marksNear(left);
    if (!found.length && !marks.length) return this.hideTip();
    this.tip.replaceChildren(...found.slice(0, SHOWN_LINES).map((one) => this.describe(one)));
    if (found.length > SHOWN_LINES) this.tip.append(element("div", "more", `${found.length - SHOWN_LINES} more curves`));
    this.tip.append(...marks); // below what was asked for: the value
    this.tip.hidden = false;
    const over = this.chart.over;
    const room = over.clientWidth - left;
    const x0 = over.offsetLeft + (room > this.tip.offsetWidth + 20 ? left + 14 : Math.max(left - this.tip.offsetWidth - 14, -over.offsetLeft));
    this.tip.style.left = `${Math.max(0, x0)}px`;
    this.tip.style.top = `${over.offsetTop + Math.max(4, Math.min(top, over.clientHeight) - 20)}px`;
    return undefined;
  }

  hideTip() {
    if (this.tip) this.tip.hidden = true;
  }

  // The nearest point of each curve, those nearest to the pointer first.
  near(x, left, top) {
    const found = [];
    for (const entry of this.entries) {
      if (!entry.isRaw) continue;
      const place = this.nearestPoint(entry, x, left, top);
      if (place < 0) continue;
      const px = this.chart.valToPos(entry.xs[place], "x");
      if (Math.abs(px - left) > HOVER_PX) continue;
      const y = entry.ys[place];
      const py = y === null ? top : this.chart.valToPos(y, "y");
      found.push({ entry, place, far: Math.abs(py - top) + Math.abs(px - left) });
    }
    return found.sort((a, b) => (a.entry.line.by !== null) - (b.entry.line.by !== null) || a.far - b.far);
  }

  // The point nearest to the pointer of those that lie within a few pixels sideways: a spike is as thin as a line.
  nearestPoint(entry, x, left, top) {
    const { chart } = this;
    const first = lowest(entry.xs, chart.posToVal(left - SPIKE_PX, "x"));
    const last = Math.min(lowest(entry.xs, chart.posToVal(left + SPIKE_PX, "x")), first + MOST_POINTS);
    let best = null;
    for (let place = first; place < last; place += 1) {
      if (entry.ys[place] === null) continue;
      const [px, py] = [chart.valToPos(entry.xs[place], "x"), chart.valToPos(entry.ys[place], "y")];
      const far = Math.abs(px - left) + Math.abs(py - top);
      if (best === null || far < best.far) best = { place, far };
    }
    return best === null ? nearest(entry.xs, x) : best.place;
  }

  describe({ entry, place }) {
    const { line } = entry;
    const id = entry.ids[place];
    const { run: source, segment } = pieceOf(line, id);
    const run = this.page.runs[line.run];
    const row = element("div", "point");
    const swatch = element("span", "swatch");
    swatch.style.background = line.by === null ? this.page.colours.run(line.run) : this.page.colours.superseded(line.run, this.page.runs.length);
    const value = element("strong", "value", valueText(line.value[id]));
    row.append(swatch, value);
    if (this.page.runs.length > 1) row.append(element("span", "of", ` ${run.id}`));
    const label = line.label?.[id];
    const where = `${whole(line.tokens[id])} tokens · step ${whole(line.step[id])} · ${utc(line.time[id])}`;
    const whose = segment === null ? "" : ` · ${source === run.id ? "" : `${source}, `}segment ${segment}`;
    row.append(element("div", "where", where + whose));
    if (line.by !== null) row.append(element("div", "state", `superseded by segment ${line.by}`));
    else if (id >= line.settled) row.append(element("div", "state", "provisional: beyond the newest checkpoint"));
    if (label?.text) row.append(element("div", "state", label.text));
    const smoothed = this.entries.find((other) => other.line === line && !other.isRaw);
    if (smoothed) {
      const near = nearest(smoothed.xs, entry.xs[place]);
      if (near >= 0) row.append(element("div", "state", `smoothed ${valueText(+smoothed.ys[near]?.toPrecision(6))}`));
    }
    return row;
  }

  marksNear(left) {
    if (!this.marked) return [];
    const is = (x) => Math.abs(this.chart.valToPos(x, "x") - left) <= MARK_PX;
    const inside = (band) => {
      const ends = [band.first, band.last].map((x) => this.chart.valToPos(x, "x"));
      return left >= ends[0] - MARK_PX && left <= ends[1] + MARK_PX;
    };
    const alerts = this.marked.alerts.filter((mark) => is(mark.x)).sort((a, b) => b.isOwn - a.isOwn);
    const marks = [
      ...alerts,
      ...this.marked.borders.filter((mark) => is(mark.x)),
      ...this.marked.bands.filter(inside),
      ...this.marked.checkpoints.filter((mark) => is(mark.x)),
    ];
    const shown = marks.slice(0, SHOWN_MARKS).map((mark) => element("div", alerts.includes(mark) ? "mark bad" : "mark", mark.text));
    if (marks.length > SHOWN_MARKS) shown.push(element("div", "more", `${marks.length - SHOWN_MARKS} more marks`));
    return shown;
  }

  // Show where the pointer is in another chart.
  echo(x) {
    if (!this.chart) return;
    this.isEcho = true;
    this.chart.setCursor({ left: this.chart.valToPos(x, "x"), top: -10 }, false);
    this.isEcho = false;
  }

  leave() {
    this.chart?.setCursor({ left: -10, top: -10 });
    this.hideTip();
  }

  // Zoom

  onSelect(chart) {
    const { left, top, width, height } = chart.select;
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const isWide = width > 4 && width < chart.over.clientWidth - 1;
    const isHigh = height > 4 && height < chart.over.clientHeight - 1;
    if (isWide) this.page.zoom([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
    if (isHigh) chart.setScale("y", { min: chart.posToVal(top + height, "y"), max: chart.posToVal(top, "y") });
  }

  applyZoom() {
    const [min, max] = this.page.range();
    this.chart?.setScale("x", { min, max });
  }

  act(what) {
    if (what === "wide") {
      this.figure.classList.toggle("wide");
      this.resize();
      return;
    }
    const [min, max] = this.page.range();
    if (what === "all") this.page.zoom(null);
    else this.page.zoomBy(what === "in" ? 0.5 : 2, this.at ? this.at[0].xs[this.at[1]] : this.page.middle(min, max));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.chart) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: 25, PageUp: -25 };
    if (event.key in steps) this.move(steps[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key === "Home") this.move(-Infinity);
    else if (event.key === "End") this.move(Infinity);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.nextCurve(event.key === "ArrowUp" ? -1 : 1);
    else if (event.key === "+" || event.key === "=") this.act("in");
    else if (event.key === "-") this.act("out");
    else if (event.key === "0" || event.key === "Escape") this.act("all");
    else return;
    event.preventDefault();
  }

  nextCurve(by) {
    const raw = this.entries.filter((entry) => entry.isRaw);
    if (!raw.length) return;
    const now = this.at ? raw.indexOf(this.at[0]) : raw.length - 1;
    const entry = raw[(now + by + raw.length) % raw.length];
    const x = this.at ? this.at[0].xs[this.at[1]] : entry.xs[0];
    this.at = [entry, nearest(entry.xs, x)];
    this.move(0);
  }

  // Stand on the next point of a curve, and say it.
  move(by) {
    const raw = this.entries.filter((entry) => entry.isRaw);
    if (!raw.length) return;
    const [first, last] = this.page.range();
    if (!this.at || !raw.includes(this.at[0])) {
      const entry = raw.at(-1);
      this.at = [entry, Math.max(0, nearest(entry.xs, by < 0 ? last : first) - Math.sign(by))];
    }
    const [entry, place] = this.at;
    const low = lowest(entry.xs, first);
    const high = Math.max(low, lowest(entry.xs, last + Number.EPSILON) - (entry.xs[lowest(entry.xs, last)] > last ? 1 : 0));
    this.at[1] = Math.max(low, Math.min(place + by, Math.min(high, entry.xs.length - 1)));
    const x = entry.xs[this.at[1]];
    const y = entry.ys[this.at[1]];
    const left = this.chart.valToPos(x, "x");
    const top = y === null ? 10 : this.chart.valToPos(y, "y");
    this.chart.setCursor({ left, top }, false);
    const said = this.describe({ entry, place: this.at[1] });
    this.tip.replaceChildren(said, ...this.marksNear(left));
    this.tip.hidden = false;
    this.tip.style.left = `${Math.max(0, Math.min(left + 76, this.frame.clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${Math.max(4, top - 20)}px`;
    this.page.say([...said.children].map((child) => child.textContent.trim()).filter(Boolean).join(", "));
  }

  // Fingers: one moves the pointer sideways, two zoom.
  onTouches() {
    const fingers = new Map();
    let before = null;
    const move = (event) => {
      if (event.pointerType !== "touch" || !fingers.has(event.pointerId) || !this.chart) return;
      const box = this.chart.over.getBoundingClientRect();
      fingers.set(event.pointerId, event.clientX - box.left);
      const [one, two] = [...fingers.values()];
      if (fingers.size === 1) this.chart.setCursor({ left: one, top: event.clientY - box.top });
      else if (fingers.size === 2) {
        const distance = Math.max(12, Math.abs(one - two));
        if (before) this.page.zoomBy(before / distance, this.chart.posToVal((one + two) / 2, "x"));
        before = distance;
      }
    };
    const end = (event) => {
      fingers.delete(event.pointerId);
      before = null;
    };
    this.frame.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") return;
      fingers.set(event.pointerId, 0);
      move(event);
    });
    this.frame.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) this.frame.addEventListener(name, end);
  }
}

// Where in ascending numbers the first one stands that is not below x; their number when there is none.
function lowest(xs, x) {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(xs, x) {
  const at = lowest(xs, x);
  if (at === 0) return xs.length ? 0 : -1;
  if (at === xs.length) return at - 1;
  return x - xs[at - 1] <= xs[at] - x ? at - 1 : at;
}

// Where a logarithmic axis has lines: round numbers of a narrow range, and powers of ten of a wide one.
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (!(decades > 0)) return [low];
  if (decades < 1) return roundTicks(low, high);
  const digits = decades <= 4 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 8));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    for (const digit of digits) {
      const place = digit * 10 ** power;
      if (place >= low && place <= high) ticks.push(place);
    }
  }
  return ticks;
}

function roundTicks(low, high) {
  const rough = (high - low) / 6;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * ([1, 2, 5].find((digit) => digit * size >= rough) ?? 10);
  const ticks = [];
  for (let place = Math.ceil(low / step) * step; place <= high; place += step) ticks.push(+place.toPrecision(12));
  return ticks;
}

// Times of day, and below them the date wherever it is another one.
function timeLabels(places) {
  let before = "";
  return places.map((ms) => {
    const [date, time] = new Date(ms).toISOString().split("T");
    const isNew = date !== before;
    before = date;
    const seconds = places.length > 1 && places[1] - places[0] < 60e3 ? time.slice(0, 8) : time.slice(0, 5);
    return isNew ? `${seconds}\n${date}` : seconds;
  });
}

// Lines of an axis at multiples of 1, 2, 2.5 or 5, however large or small the values are; uPlot's own end at 1e32.
const ANY_AXIS = {
  incrs: (_, index, first, last) => {
    const power = Math.floor(Math.log10(last - first));
    const steps = [-2, -1, 0].flatMap((less) => [1, 2, 2.5, 5].map((step) => +`${step}e${power + less}`));
    return steps.filter((step) => step > 0 && step < Infinity);
  },
  splits: (_, index, first, last, step) => {
    const places = [];
    for (let count = Math.ceil(first / step); count * step <= last && places.length < 500; count += 1) {
      places.push(+(count * step).toPrecision(15) || 0);
    }
    return places;
  },
};

function tick(value, more = 0) {
  const size = Math.abs(value);
  const text = short(value, 4 + more);
  if (size >= 1e5) {
    const isShort = text.length <= 7 + more && !text.includes("e");
    return isShort ? text : value.toExponential(2 + more).replace(/\.?0*e/, "e");
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1 + more).replace("e-", "e−");
  return String(+value.toPrecision(5 + more));
}

function element(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

// Strokes

function clip(ctx, bbox) {
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
}

function stroke(ctx, colour, width, dash, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
  ctx.setLineDash([]);
}

function triangle(ctx, colour, x, bottom, size) {
  ctx.beginPath();
  ctx.fillStyle = colour;
  ctx.moveTo(x - size, bottom);
  ctx.lineTo(x + size, bottom);
  ctx.lineTo(x, bottom - 1.7 * size);
  ctx.fill();
}

function cross(ctx, colour, x, y, size, unit) {
  stroke(ctx, colour, 2 * unit, [], x - size, y - size, x + size, y + size);
  stroke(ctx, colour, 2 * unit, [], x - size, y + size, x + size, y - size);
}

function star(ctx, colour, x, y, size) {
  ctx.beginPath();
  ctx.fillStyle = colour;
  for (let point = 0; point < 10; point += 1) {
    const far = point % 2 ? size * 0.45 : size;
    const turn = (point * Math.PI) / 5 - Math.PI / 2;
    ctx.lineTo(x + far * Math.cos(turn), y + far * Math.sin(turn));
  }
  ctx.fill();
}
