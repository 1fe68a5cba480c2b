// The page: unpacks the data, and keeps all charts at one axis, one zoom and one theme.

const NEAR_WINDOW = "600px"; // charts this close to the window are drawn
const FEW_PANELS = 24; // so many are all drawn at once, and stay: a picture of the whole page has them

class Page {
  constructor(data) {
    this.runs = data.runs;
    this.runs.forEach((run, index) => (run.dash = index < 8 ? undefined : [8, 3]));
    this.state = {
      axis: data.axis,
      logx: false,
      logy: false,
      smoothing: 0,
      superseded: true,
      segments: true,
      alerts: true,
      checkpoints: true,
      clip: false,
      zoom: null,
      hidden: new Set(),
    };
    this.colours = makeColours();
    this.panels = data.panels.map((spec, index) => new Panel(this, spec, document.getElementById(`panel-${index}`)));
    this.live = document.getElementById("said");
    if (this.panels.length) this.bindControls();
    this.watch();
  }

  // Axis

  isLogX() {
    return this.state.logx && this.state.axis !== "time";
  }

  // What is seen of the axis, with a little room on both sides.
  range() {
    if (this.state.zoom) return this.state.zoom;
    const { axis } = this.state;
    let low = Infinity;
    let high = -Infinity;
    this.runs.forEach((run, index) => {
      if (this.state.hidden.has(index) || !run.extent) return;
      const [first, last, positive] = run.extent[axis === "elapsed" ? "time" : axis];
      const at = (place) => (axis === "elapsed" ? (place - run.first_time) / HOUR_MS : place);
      low = Math.min(low, at(this.isLogX() ? (axis === "elapsed" ? Math.max(first, run.first_time + 1000) : positive) : first));
      high = Math.max(high, at(last));
    });
    if (low > high) return this.isLogX() ? [1, 10] : [0, 1];
    if (this.isLogX()) return low === high ? [low / 2, high * 2] : [low, high * 1.02];
    const room = (high - low) * 0.01 || Math.abs(high) * 0.01 || 1;
    return [low - room, high + room];
  }

  middle(low, high) {
    return this.isLogX() ? Math.sqrt(low * high) : (low + high) / 2;
  }

  tokensSpan() {
    let [low, high] = [Infinity, -Infinity];
    for (const { extent } of this.runs) {
      if (!extent) continue;
      low = Math.min(low, extent.tokens[0]);
      high = Math.max(high, extent.tokens[1]);
    }
    return high > low ? high - low : 0;
  }

  zoom(range) {
    this.state.zoom = range && range[1] > range[0] ? range : null;
    document.body.classList.toggle("zoomed", this.state.zoom !== null);
    this.panels.forEach((panel) => panel.applyZoom());
  }

  // Make what is seen narrower or wider around a place that stays where it is.
  zoomBy(factor, around) {
    const [low, high] = this.range();
    if (this.isLogX()) this.zoom([around * (low / around) ** factor, around * (high / around) ** factor]);
    else this.zoom([around - (around - low) * factor, around + (high - around) * factor]);
  }

  // Controls

  bindControls() {
    const controls = document.getElementById("controls");
    controls.elements.axis.value = this.state.axis;
    controls.addEventListener("input", (event) => this.onInput(event.target));
    controls.addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("reset").addEventListener("click", () => this.zoom(null));
    document.querySelectorAll("input[data-run]").forEach((box) => {
      box.addEventListener("input", () => {
        this.state.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
        this.rebuild();
      });
    });
    document.querySelectorAll("button[data-tokens]").forEach((button) => {
      button.addEventListener("click", () => this.lookAt(button.dataset));
    });
    document.getElementById("more").open = window.innerWidth >= 900;
    const filter = document.getElementById("filter");
    filter?.addEventListener("input", () => this.filter(filter.value));
    document.querySelectorAll("details.group").forEach((group) => group.addEventListener("toggle", () => this.resize()));
  }

  onInput(input) {
    const { state } = this;
    if (input.name === "axis") {
      state.axis = input.value;
      state.zoom = null;
      document.body.classList.remove("zoomed");
    } else if (input.name === "smoothing") {
      // From a thousandth of the run to a fifth of it, evenly in logarithms.
      state.smoothing = Number(input.value) === 0 ? 0 : 0.001 * 200 ** ((Number(input.value) - 1) / 99);
      const text = state.smoothing ? `half-life ${short(+(state.smoothing * this.tokensSpan()).toPrecision(3))} tokens` : "off";
      document.getElementById("smoothed").textContent = text;
    } else if (input.name in state) state[input.name] = input.checked;
    else return;
    if (input.name === "logx") this.zoom(null);
    this.rebuild();
  }

  rebuild() {
    this.panels.forEach((panel) => panel.chart && panel.build());
  }

  resize() {
    this.panels.forEach((panel) => panel.chart && panel.resize());
  }

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.panels.forEach((panel) => {
      const name = panel.spec.name.toLowerCase();
      panel.figure.hidden = !words.every((word) => name.includes(word));
    });
    document.querySelectorAll("details.group").forEach((group) => {
      group.hidden = !group.querySelector("figure:not([hidden])");
    });
  }

  // Bring a place of a run into view in the first chart.
  lookAt({ tokens, step, time, index }) {
    const run = this.runs[Number(index)];
    const at = { tokens: Number(tokens), step: Number(step), time: Number(time) };
    at.elapsed = (at.time - run.first_time) / HOUR_MS;
    const x = at[this.state.axis];
    const [low, high] = (this.zoom(null), this.range());
    const half = this.isLogX() ? null : (high - low) / 40;
    this.zoom(half ? [x - half, x + half] : [x / 1.2, x * 1.2]);
    this.panels[0]?.figure.scrollIntoView({ block: "center", behavior: "instant" });
  }

  echo(from, x) {
    this.panels.forEach((panel) => panel !== from && panel.echo(x));
  }

  say(text) {
    this.live.textContent = text;
  }

  // Window, theme, paper

  watch() {
    const isFew = this.panels.length <= FEW_PANELS;
    const seen = new IntersectionObserver(
      (changes) => {
        for (const change of changes) {
          const panel = this.panels[Number(change.target.dataset.panel)];
          if (change.isIntersecting && !panel.chart) panel.build();
          else if (!change.isIntersecting && panel.chart && !isFew && !this.isPrinting) panel.destroy();
        }
        document.body.dataset.ready = "yes";
      },
      { rootMargin: NEAR_WINDOW },
    );
    // What the window shows at first is drawn at once: a picture may be taken before the observer is asked.
    const first = this.panels.filter((panel) => isFew || panel.figure.getBoundingClientRect().top < window.innerHeight);
    first.forEach((panel) => panel.build());
    this.panels.forEach((panel) => seen.observe(panel.figure));
    if (!this.panels.length) document.body.dataset.ready = "yes";
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return; // a phone's bars come and go
      width = window.innerWidth;
      this.resize();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    window.addEventListener("beforeprint", () => {
      this.isPrinting = true;
      document.documentElement.classList.add("paper");
      this.panels.forEach((panel) => panel.figure.offsetParent && panel.build());
    });
    window.addEventListener("afterprint", () => {
      this.isPrinting = false;
      document.documentElement.classList.remove("paper");
      this.rebuild();
    });
  }
}

// Colours are those of the style sheet, asked for when something is drawn: the theme may change meanwhile.
function makeColours() {
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = (colour) => (/^#[0-9a-f]{6}$/i.test(colour) ? `${colour}48` : colour);
  return {
    run: (index) => of(`--run-${index % 8}`),
    superseded: (index, runs) => (runs > 1 ? `${of(`--run-${index % 8}`)}80` : of("--superseded")),
    faint,
    ink: () => of("--ink-2"),
    grid: () => of("--grid"),
    border: () => of("--border-mark"),
    left: () => of("--left"),
    alert: () => of("--alert"),
    gap: () => of("--gap"),
    damage: () => of("--damage"),
    best: () => of("--best"),
  };
}

function unpack(text) {
  return JSON.parse(new TextDecoder().decode(gunzip(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)))));
}

function main() {
  const told = document.getElementById("told") ?? document.createElement("p"); // a run without points has no charts
  try {
    window.report = new Page(unpack(document.getElementById("data").textContent));
    told.hidden = true;
  } catch (error) {
    told.textContent = `The charts could not be drawn (${error.message}); the tables below are complete. Charts need a browser of 2023 or later.`;
    throw error;
  }
}

main();
