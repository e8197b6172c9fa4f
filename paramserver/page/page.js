"use strict";
// The page asks the daemon for its figures every two seconds and brings what is shown up to date in place, so that
// focus, selection and the reading position of a screen reader stay. Names come from clients: they are put into the
// page as text only (textContent), and the document's policy forbids anything else.

const POLL_MS = 2000;
const TIMEOUT_MS = 8000;
// The time that the graphs show: the shortest of these that has all samples.
const WINDOWS = [60, 120, 300, 600];

const $ = (id) => document.getElementById(id);

// --- numbers for people

// Number and unit stay on one line.
const GAP = "\u00a0";
const digits = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 ? Math.round(value) : digits(value)}${GAP}${units[unit]}`;
}

const speed = (value) => `${bytes(value)}/s`;
const count = (value) => Math.round(value).toLocaleString("en");
const share = (part) => `${part > 0 && part < 0.01 ? "<1" : Math.round(100 * part)}${GAP}%`;

function seconds(value) {
  if (value === 0) return `0${GAP}s`;
  if (value < 0.0995) return `${digits(1000 * value)}${GAP}ms`;
  if (value < 59.95) return `${digits(value)}${GAP}s`;
  if (value < 3599.5) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
}

const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");

function moment(unix) {
  const then = new Date(1000 * unix);
  const day = then.toLocaleDateString("en-CA");
  return day === new Date().toLocaleDateString("en-CA") ? clock(unix) : `${day} ${clock(unix)}`;
}

// --- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Makes the children of `parent` one for each item: those of known keys stay, the others come or go.
function keep(parent, items, key, make, update) {
  const known = parent.kept ?? new Map();
  const kept = new Map();
  for (const item of items) {
    const entry = known.get(key(item)) ?? make(item);
    kept.set(key(item), entry);
    update(entry, item);
  }
  for (const [name, entry] of known) if (!kept.has(name)) entry.root.remove();
  let place = parent.firstChild;
  for (const entry of kept.values()) {
    if (entry.root === place) place = place.nextSibling;
    else parent.insertBefore(entry.root, place);
  }
  parent.kept = kept;
}

// A row of a table: the first cell is its header unless `plain`. The labels are shown beside the cells on a phone.
function tableRow(labels, { plain = false, numbers = [] } = {}) {
  const root = element("tr", { role: "row" });
  const cells = labels.map((label, index) => {
    const isHeader = index === 0 && !plain;
    const cell = isHeader
      ? element("th", { role: "rowheader", scope: "row" })
      : element("td", { role: "cell", "data-label": label });
    if (numbers.includes(index)) cell.className = "number";
    root.append(cell);
    return cell;
  });
  return { root, cells };
}

// --- the samples

const samples = { columns: new Map(), rows: [], next: 0, epoch: null, window: 60 };

function takeSamples(document_) {
  if (samples.epoch !== document_.epoch) {
    samples.epoch = document_.epoch;
    samples.rows = [];
  }
  samples.columns = new Map(document_.history.columns.map((name, index) => [name, index]));
  samples.rows.push(...document_.history.rows);
  samples.next = document_.history.next;
  const longest = last(WINDOWS);
  while (samples.rows.length && samples.rows[0][0] < document_.time - longest) samples.rows.shift();
  const length = samples.rows.length ? last(samples.rows)[0] - samples.rows[0][0] : 0;
  samples.window = WINDOWS.find((window_) => window_ >= length) ?? longest;
}

function series(name) {
  const index = samples.columns.get(name);
  return index === undefined ? [] : samples.rows.map((row) => row[index]);
}

// The integral of a rate over the samples that are shown.
function total(name) {
  const values = series(name);
  let sum = 0;
  for (let at = 1; at < values.length; at += 1) sum += values[at] * (samples.rows[at][0] - samples.rows[at - 1][0]);
  return sum;
}

const last = (values) => (values.length ? values[values.length - 1] : 0);
const highest = (values) => values.reduce((most, value) => Math.max(most, value), 0);

// --- graphs

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 600;
const HIGH = 100;

function drawing(className, paths) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("preserveAspectRatio", "none");
  // The figures beside a graph say the same in words.
  svg.setAttribute("aria-hidden", "true");
  if (className) svg.setAttribute("class", className);
  const made = paths.map((name) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    svg.append(path);
    return path;
  });
  return { svg, paths: made };
}

const at = (x, y) => `${x.toFixed(1)},${y.toFixed(1)}`;
const heightOf = (value, top) => HIGH - 1 - (top > 0 ? value / top : 0) * (HIGH - 3);

// The places of the samples from left to right; the newest is at the right.
function places() {
  const newest = last(samples.rows)?.[0] ?? 0;
  return samples.rows.map((row) => WIDE * (1 - (newest - row[0]) / samples.window));
}

function line(xs, values, top) {
  return values.length ? `M${values.map((value, index) => at(xs[index], heightOf(value, top))).join("L")}` : "";
}

function area(xs, values, top) {
  return values.length ? `${line(xs, values, top)}L${at(last(xs), HIGH)}L${at(xs[0], HIGH)}Z` : "";
}

// One graph of one or two columns over the last minutes, with what they are now and were at most.
function graph({ label, parts, format, low = false }) {
  const { svg, paths } = drawing("", parts.flatMap((_, index) => (index ? ["line-1"] : ["area-0", "line-0"])));
  const key = element("dl", { class: "key" });
  const values = parts.map((part, index) => {
    const value = element("dd");
    const mark = element("span", { class: `mark-${index}`, "aria-hidden": "true" });
    key.append(element("div", {}, element("dt", {}, mark, part.label), value));
    return value;
  });
  // The graph ends at 0 below and at its largest value above.
  const scale = element("p", { class: "scale", "aria-hidden": "true" });
  const root = element("div", { class: low ? "graph low" : "graph", role: "group", "aria-label": label }, key, scale, svg);
  const update = () => {
    const xs = places();
    const columns = parts.map((part) => series(part.column));
    const top = Math.max(...columns.map(highest));
    setText(scale, `0 to ${format(top)}`);
    columns.forEach((column, index) => {
      const most = parts.length > 1 ? ` (most ${format(highest(column))})` : "";
      setText(values[index], `${format(last(column))}${most}`);
      if (index === 0) paths[0].setAttribute("d", area(xs, column, top));
      paths[index + 1].setAttribute("d", line(xs, column, top));
    });
  };
  return { root, update };
}

const minutes = (value) => (value >= 60 ? `${value / 60} min` : `${value} s`);

function ticks() {
  const [began, middle] = [element("span"), element("span")];
  const root = element("div", { class: "ticks", "aria-hidden": "true" }, began, middle, element("span", {}, "now"));
  const update = () => {
    setText(began, `${minutes(samples.window)} ago`);
    setText(middle, minutes(samples.window / 2));
  };
  return { root, update };
}

// --- tiers

const TIER_NAMES = { host: "Host memory", nvme: "NVMe", gpu: "GPU memory", remote: "Memory of lenders" };
const tierName = (name) => TIER_NAMES[name] ?? name;

function segments(tier) {
  const held = tier.leased_bytes + tier.evictable_bytes + tier.quarantined_bytes + tier.bad_bytes;
  const other = Math.max(0, tier.used_bytes - held);
  const isHost = tier.name === "host";
  const hasCopies = tier.name !== "nvme";
  return [
    { name: "leased", label: "leased", value: tier.leased_bytes, shown: hasCopies },
    { name: "used", label: isHost ? "other use" : "used", value: other, shown: isHost || !hasCopies },
    { name: "evictable", label: "evictable", value: tier.evictable_bytes, shown: hasCopies },
    { name: "quarantined", label: "quarantined", value: tier.quarantined_bytes, shown: tier.quarantined_bytes > 0 },
    { name: "bad", label: "damaged", value: tier.bad_bytes, shown: tier.bad_bytes > 0 },
    { name: "free", label: "free", value: tier.free_bytes, shown: true },
  ].filter((segment) => segment.shown);
}

function makeTier(tier) {
  const title = element("h3", {}, tierName(tier.name));
  const sum = element("p");
  const bar = element("div", { class: "bar", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": `${tierName(tier.name)} in use` });
  const key = element("dl", { class: "key" });
  const fine = element("p", { class: "fine" });
  const root = element("article", { class: "card tier" }, element("div", { class: "head" }, title, sum), bar, key, fine);
  return { root, sum, bar, key, fine };
}

function updateTier(entry, tier) {
  const parts = segments(tier);
  const use = tier.budget_bytes ? tier.used_bytes / tier.budget_bytes : 0;
  setText(entry.sum, `${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)}, ${share(use)}`);
  // In percent, for screen readers that read the number and not the text.
  setAttribute(entry.bar, "aria-valuenow", String(Math.round(100 * use)));
  setAttribute(entry.bar, "aria-valuetext", `${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)} used: ${parts.map((part) => `${part.label} ${bytes(part.value)}`).join(", ")}`);
  keep(entry.bar, parts.filter((part) => part.name !== "free"), (part) => part.name,
    (part) => ({ root: element("span", { class: part.name }) }),
    (made, part) => { made.root.style.width = `${100 * part.value / Math.max(1, tier.budget_bytes)}%`; });
  keep(entry.key, parts, (part) => part.name,
    (part) => {
      const value = element("dd");
      const swatch = element("span", { class: `swatch ${part.name}`, "aria-hidden": "true" });
      return { root: element("div", {}, element("dt", {}, swatch, part.label), value), value };
    },
    (made, part) => setText(made.value, bytes(part.value)));
  const asked = tier.hits + tier.misses;
  const facts = [
    asked ? `${share(tier.hits / asked)} of ${count(asked)} reads were served from here` : "",
    tier.name === "host" ? "" : `read ${bytes(tier.read_bytes)}, written ${bytes(tier.written_bytes)} since the start`,
    `queue ${count(tier.queue)}`,
    tier.gradient_bytes ? `${bytes(tier.gradient_bytes)} of ${tier.name === "nvme" ? "spilled" : "parked"} gradients` : "",
    parts.some((part) => part.label === "other use" && part.value)
      ? "other use: what jobs place here or has not reached NVMe, and buffers of the optimizer" : "",
    tier.damaged_blocks ? `${count(tier.damaged_blocks)} reads found damage` : "",
    tier.detail,
  ];
  setText(entry.fine, facts.filter(Boolean).join(" · "));
}

// --- jobs

const JOB_LABELS = ["Job", "Ranks here", "Committed step", "Durable step", "Steps / min", "Step time", "Last steps", "Host", "NVMe"];
const step = (number) => (number === null ? "none" : count(number));

function makeJob() {
  const row = tableRow(JOB_LABELS, { numbers: [1, 2, 3, 4, 5, 7, 8] });
  const name = element("bdi", { class: "clamp" });
  row.cells[0].append(element("span", {}, name));
  const spark = drawing("spark", ["area-0", "line-0"]);
  row.cells[6].append(spark.svg);
  const texts = row.cells.map((cell, index) => (index === 0 || index === 6 ? null : cell.appendChild(element("span"))));
  return { ...row, name, texts, paths: spark.paths };
}

function updateJob(entry, job) {
  setText(entry.name, job.name);
  setAttribute(entry.name, "title", job.name);
  const timing = job.step;
  const values = [
    null,
    `${count(job.sessions)} of ${count(job.ranks)}`,
    step(job.committed_step),
    step(job.durable_step),
    job.steps_per_minute === null ? "–" : digits(job.steps_per_minute),
    timing === null ? "–" : seconds(timing.median_seconds),
    null,
    bytes(job.bytes.host ?? 0),
    bytes(job.bytes.nvme ?? 0),
  ];
  values.forEach((value, index) => { if (value !== null) setText(entry.texts[index], value); });
  const recent = job.recent_seconds;
  const xs = recent.map((_, index) => (recent.length > 1 ? WIDE * index / (recent.length - 1) : WIDE));
  const top = highest(recent);
  entry.paths[0].setAttribute("d", recent.length > 1 ? area(xs, recent, top) : "");
  entry.paths[1].setAttribute("d", recent.length > 1 ? line(xs, recent, top) : "");
}

// --- what binds a step

const NEED_NAMES = { nvme_read: "NVMe reads", nvme_write: "NVMe writes", optimizer: "Optimizer", commit: "Commit" };

function verdict(timing) {
  const part = timing.binding_fraction === null ? "" : share(timing.binding_fraction);
  switch (timing.binding) {
    case "nvme_read": return `NVMe reads bind it: at the devices' measured speed they alone take ${part} of the step.`;
    case "nvme_write": return `NVMe writes bind it: at the devices' measured speed they alone take ${part} of the step.`;
    case "optimizer": return `The optimizer in the daemon binds it: it works in ${part} of the step.`;
    case "commit": return `The commit binds it: it takes ${part} of the step.`;
    case "fetch_waiting": return `Waiting for bytes binds it: in ${part} of the step a client waits for bytes that were not fetched ahead.`;
    case "trainer": return `Nothing in this store binds it: what needs longest takes ${part} of the step. The report of the trainers (engine.step_report) has the rest.`;
    default: return "Not known yet: the speed of the devices is measured once 64 MiB were moved and synced.";
  }
}

function needs(timing) {
  const device = timing.device_bytes_per_second;
  const moved = (own, all) => (all > own * 1.01 + 4096 ? `${bytes(own)} of ${bytes(all)} for all jobs` : bytes(own));
  const notes = {
    nvme_read: `${moved(timing.read_bytes, timing.all_read_bytes)}${device ? ` at ${speed(device)}` : ""}`,
    nvme_write: `${moved(timing.written_bytes, timing.all_written_bytes)}${device ? ` at ${speed(device)}` : ""}`,
    optimizer: "at work in the daemon",
    commit: "from the last update to the end",
  };
  return [
    { name: "whole", label: "Step", value: timing.seconds, note: `from commit to commit, mean of ${count(timing.steps)}` },
    ...Object.entries(timing.needed_seconds).map(([name, value]) => ({ name, label: NEED_NAMES[name] ?? name, value, note: notes[name] ?? "" })),
    { name: "fetch_waiting", label: "Waits for bytes", value: timing.fetch_waiting_seconds, note: "not fetched ahead" },
  ];
}

function makeStep() {
  const name = element("bdi", { class: "clamp" });
  const text = element("p", { class: "verdict" });
  const body = element("tbody", { role: "rowgroup" });
  const caption = element("caption");
  const heads = ["Needs", "Part of the step", "Time"].map((label, index) =>
    element("th", { role: "columnheader", scope: "col", class: index === 2 ? "number" : "" }, label));
  const head = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads));
  const table = element("table", { class: "need", role: "table" }, caption, head, body);
  const root = element("article", { class: "card" }, element("h3", {}, name), text, table);
  return { root, name, text, caption, body };
}

function updateStep(entry, job) {
  const timing = job.step;
  setText(entry.name, job.name);
  setAttribute(entry.name, "title", job.name);
  setText(entry.text, verdict(timing));
  setText(entry.caption, "Least time that each needs for a step");
  keep(entry.body, needs(timing), (need) => need.name,
    (need) => {
      const plot = element("span");
      const note = element("span", { class: "fine" });
      const value = element("span");
      const bar = element("span", { class: "plot", "aria-hidden": "true" }, plot);
      const track = element("td", { class: "track", role: "cell" }, bar, note);
      const header = element("th", { role: "rowheader", scope: "row" }, need.label);
      const root = element("tr", { role: "row" }, header, track, element("td", { class: "number", role: "cell" }, value));
      return { root, plot, note, value };
    },
    (made, need) => {
      const isBinding = need.name === timing.binding;
      setAttribute(made.root, "class", need.name === "whole" ? "whole" : isBinding ? "binds" : "");
      made.plot.style.width = `${100 * Math.min(1, need.value === null ? 0 : need.value / timing.seconds)}%`;
      setText(made.note, need.note);
      setText(made.value, need.value === null ? "not known" : seconds(need.value));
    });
}

// --- traffic

function figures(document_) {
  const devices = document_.devices.map((device, index) => ({
    key: `device ${index}`,
    title: device.path,
    rates: [{ label: "read and written", column: `device_${index}_bytes_per_second` }],
    queue: [{ label: "requests queued", column: `device_${index}_queue` }],
    note: [
      device.measured_bytes_per_second ? `measured speed ${speed(device.measured_bytes_per_second)}` : "speed not measured yet",
      `${bytes(device.used_bytes)} of ${bytes(device.size_bytes)} used`,
      `${bytes(device.in_flight_bytes)} at the device`,
      device.stalled_seconds >= 0.1 ? `oldest request ${seconds(device.stalled_seconds)}` : "",
      device.direct ? "O_DIRECT" : "through the page cache",
    ].filter(Boolean).join(" · "),
  }));
  // The graph of an only device would be that of the NVMe tier once more.
  const only = devices.length === 1 ? devices.pop() : null;
  const wanted = document_.tiers.map((tier) => ({
    key: tier.name,
    title: tierName(tier.name),
    rates: tier.name === "host"
      ? [{ label: "fetched from below", column: "host_fetched_bytes_per_second" }]
      : [{ label: "read", column: `${tier.name}_read_bytes_per_second` }, { label: "written", column: `${tier.name}_written_bytes_per_second` }],
    queue: tier.name === "host"
      ? [{ label: "fetches queued", column: "host_fetch_queue" }, { label: "waiting for room", column: "host_room_queue" }]
      : [{ label: "requests queued", column: `${tier.name}_queue` }],
    note: tier.name === "nvme" && only ? `${only.title} · ${only.note}` : "",
  }));
  return [...wanted, ...devices];
}

function makeFigure(figure) {
  const rates = graph({ label: "Bandwidth", parts: figure.rates, format: speed });
  const queue = graph({ label: "Queue", parts: figure.queue, format: count, low: true });
  const axis = ticks();
  const note = element("p", { class: "fine" });
  const root = element("figure", { class: "card" }, element("figcaption", {}, figure.title), rates.root, queue.root, axis.root, note);
  return { root, rates, queue, axis, note };
}

function updateFigure(entry, figure) {
  entry.rates.update();
  entry.queue.update();
  entry.axis.update();
  setText(entry.note, figure.note);
  entry.note.hidden = !figure.note;
}

// --- stalls

const STALL_LABELS = ["Cause", "Now", "Last minutes", "Since the start", "Graph"];

function stalls(document_) {
  const { event_loop: loop, room, fetch: fetched } = document_.stalls;
  const { sessions } = document_;
  const names = sessions.longest_silent.map((silent) => `${silent.client}${silent.job === null ? "" : ` of ${silent.job}`} (${seconds(silent.seconds)})`);
  return [
    {
      name: "Event loop blocked", note: "for more than 100 ms; the log has the stack", column: "loop_stalls_per_second",
      now: "–", recent: `${count(total("loop_stalls_per_second"))} times`,
      ever: loop.count ? `${count(loop.count)} times, longest ${seconds(loop.longest_seconds)}` : "0 times",
    },
    {
      name: "Waits for room", note: "in host memory; a larger host_budget helps", column: "room_waiting",
      now: room.waiting ? `${count(room.waiting)} requests, the first for ${seconds(room.oldest_seconds)}` : "no request",
      recent: seconds(total("room_waiting")), ever: seconds(room.seconds),
    },
    {
      name: "Waits for bytes", note: "from the devices, not fetched ahead", column: "fetch_waiting",
      now: fetched.oldest_seconds >= 0.1 ? `oldest request at a device ${seconds(fetched.oldest_seconds)}` : "no slow request",
      recent: seconds(total("fetch_waiting")), ever: seconds(fetched.seconds),
    },
    {
      name: "Silent clients", note: `not heard of for ${seconds(sessions.silent_after_seconds)}`, column: "silent_seconds",
      now: sessions.silent ? `${count(sessions.silent)} of ${count(sessions.open)}: ${names.join(", ")}` : `none of ${count(sessions.open)}`,
      recent: `longest ${seconds(highest(series("silent_seconds")))}`, ever: "–", least: sessions.silent_after_seconds,
    },
  ];
}

function makeStall(stall) {
  const row = tableRow(STALL_LABELS, { numbers: [2, 3] });
  row.cells[0].append(element("span", {}, stall.name, element("span", { class: "fine" }, stall.note)));
  const texts = row.cells.slice(1, 4).map((cell) => cell.appendChild(element("bdi", { class: "clamp" })));
  const strip = drawing("strip", ["area-0"]);
  row.cells[4].append(strip.svg);
  return { ...row, texts, path: strip.paths[0] };
}

function updateStall(entry, stall) {
  [stall.now, stall.recent, stall.ever].forEach((text, index) => setText(entry.texts[index], text));
  // A client that sends its heartbeats is silent between two of them.
  const values = series(stall.column).map((value) => (value < (stall.least ?? 0) ? 0 : value));
  entry.path.setAttribute("d", area(places(), values, Math.max(highest(values), 0.001)));
}

// --- events

const EVENT_LABELS = ["Time", "Kind", "Subject", "Event"];

function makeEvent(event) {
  const row = tableRow(EVENT_LABELS, { plain: true });
  const time = element("time", { datetime: new Date(1000 * event.time).toISOString() }, moment(event.time));
  row.cells[0].append(time);
  row.cells[1].append(event.kind);
  row.cells[2].append(element("bdi", { class: "clamp", title: event.subject }, event.subject));
  row.cells[3].append(element("bdi", {}, event.text));
  return row;
}

// --- the whole page

function showProblems(document_) {
  const problems = document_.tiers.flatMap((tier) => tier.problems.map((problem) => `${tierName(tier.name)}: ${problem}`));
  $("problems").hidden = !problems.length;
  const numbered = problems.map((text, index) => ({ text, index }));
  keep($("problem-list"), numbered, (problem) => problem.index, () => ({ root: element("li") }), (made, problem) => setText(made.root, problem.text));
  return problems.length;
}

function show(document_) {
  takeSamples(document_);
  setText($("node"), ` on ${document_.node}`);
  const open = `${count(document_.sessions.open)} ${document_.sessions.open === 1 ? "session" : "sessions"}`;
  const detached = document_.sessions.detached ? ` (${count(document_.sessions.detached)} with a broken connection)` : "";
  const transfers = `${bytes(document_.transfers.used_bytes)} of ${bytes(document_.transfers.budget_bytes)} in streams`;
  setText($("facts"), `${document_.state_dir} · version ${document_.version} · up ${seconds(document_.time - document_.started_at)} · ${open}${detached} · ${transfers}`);
  const problems = showProblems(document_);
  keep($("tiers"), document_.tiers, (tier) => tier.name, makeTier, updateTier);

  // The daemon has the newest commits first. Rows that changed places with each commit could not be read.
  const order = (one, other) => (other.sessions > 0) - (one.sessions > 0) || one.name.localeCompare(other.name);
  const jobs = [...document_.jobs].sort(order);
  $("no-jobs").hidden = jobs.length > 0;
  setText($("attach"), `export PARAMSERVER_ADDRESS=${document_.address}`);
  $("jobs").hidden = jobs.length === 0;
  setText($("jobs-caption"), document_.all_jobs > jobs.length
    ? `${count(jobs.length)} of ${count(document_.all_jobs)} jobs: those with sessions, then the newest commits`
    : `${count(jobs.length)} ${jobs.length === 1 ? "job" : "jobs"}`);
  keep($("jobs").tBodies[0], jobs, (job) => job.name, makeJob, updateJob);
  const timed = jobs.filter((job) => job.step !== null);
  $("no-steps").hidden = timed.length > 0;
  keep($("steps"), timed, (job) => job.name, makeStep, updateStep);

  setText($("span"), samples.window > 60 ? `${samples.window / 60} minutes` : "minute");
  // The events and the devices of another daemon have the same numbers, and what is shown of them is not updated.
  const ofDaemon = (key) => `${document_.epoch} ${key}`;
  keep($("traffic"), figures(document_), (figure) => ofDaemon(figure.key), makeFigure, updateFigure);
  keep($("stalls").tBodies[0], stalls(document_), (stall) => stall.name, makeStall, updateStall);
  $("no-events").hidden = document_.events.length > 0;
  $("events").hidden = document_.events.length === 0;
  keep($("events").tBodies[0], document_.events, (event) => ofDaemon(event.number), makeEvent, () => {});
  return problems;
}

// --- asking

const asking = { timer: 0, paused: false, token: "", shownAt: null, awaySince: null, underWay: false };

function setState(lamp, text, alert) {
  setAttribute($("lamp"), "class", `lamp ${lamp}`);
  setText($("state"), text);
  document.body.classList.toggle("away-now", lamp === "away");
  $("alert").hidden = !alert;
  setText($("alert"), alert);
  const node = $("node").textContent.replace(/^ on /, "");
  const name = node ? `${node} – paramserver` : "paramserver";
  document.title = lamp === "live-now" ? name : `${text} – ${name}`;
}

function showAway(why) {
  asking.awaySince ??= Date.now() / 1000;
  const since = clock(asking.awaySince);
  const shown = asking.shownAt === null ? "" : ` The figures below are those of ${clock(asking.shownAt)}.`;
  setState("away", `away since ${since}`, `The daemon has not answered since ${since}: ${why}.${shown} This page goes on asking.`);
}

// The answer to one question. What it throws says in words why there is none.
async function answerOf(path) {
  const headers = asking.token ? { Authorization: `Bearer ${asking.token}` } : {};
  try {
    const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    return { status: answer.status, text: await answer.text() };
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? `no answer within ${TIMEOUT_MS / 1000} s` : "no connection");
  }
}

async function ask() {
  if (asking.underWay) return;
  asking.underWay = true;
  clearTimeout(asking.timer);
  try {
    const answer = await answerOf(`data.json?since=${samples.next}`);
    if (answer.status === 401 || answer.status === 403) {
      askForToken(answer.status);
      return;
    }
    if (answer.status !== 200) throw new Error(`it answered ${answer.status}, ${answer.text.trim()}`);
    const document_ = JSON.parse(answer.text);
    if (samples.epoch !== null && samples.epoch !== document_.epoch) {
      // Another daemon answers, whose samples have numbers of their own.
      samples.epoch = null;
      samples.next = 0;
    } else {
      $("login").hidden = true;
      $("figures").hidden = false;
      const problems = show(document_);
      asking.shownAt = document_.time;
      asking.awaySince = null;
      setText($("as-of"), clock(document_.time));
      if (asking.paused) setState("", "paused", "");
      else setState("live-now", problems ? `live, ${count(problems)} ${problems === 1 ? "problem" : "problems"}` : "live", "");
    }
  } catch (error) {
    showAway(error.message);
  } finally {
    asking.underWay = false;
  }
  if (!asking.paused && !document.hidden && $("login").hidden) asking.timer = setTimeout(ask, POLL_MS);
}

function askForToken(status) {
  $("figures").hidden = true;
  const wasOpen = !$("login").hidden;
  $("login").hidden = false;
  setState("", "waiting for a token", "");
  $("refused").hidden = !asking.token;
  setText($("refused"), status === 403 ? "This token is not an admin's." : "The daemon does not know this token, or it has expired.");
  asking.token = "";
  if (!wasOpen) $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  asking.token = $("token").value.trim();
  $("token").value = "";
  ask();
});

$("pause").addEventListener("click", () => {
  asking.paused = !asking.paused;
  $("pause").setAttribute("aria-pressed", String(asking.paused));
  if (asking.paused) {
    clearTimeout(asking.timer);
    setState("", "paused", "");
  } else {
    ask();
  }
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(asking.timer);
  if (!document.hidden && !asking.paused && $("login").hidden) ask();
});

for (const name of ["jobs", "stalls", "events"]) $(name).classList.add("cells");
if (document.hidden) setState("", "waiting until this tab is shown", "");
else ask();
