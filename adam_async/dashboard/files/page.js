// The page: gets the parts of a run from its server, and shows them. It polls, so that a lost connection comes back.

import { RoleMap, bytes, clock, count, drawCurves, duration, element, sample, share, spark } from "./drawing.js";

const NOW_MS = 1000; // between two requests for the state of the moment
const CURVES_EVERY = 4; // requests for the state per request for the curves
const RARELY = 10; // requests are rarer by this for a hidden page, and for a past run
const WAIT_MS = 8000; // deadline of a request
const STALE_S = 6; // seconds without a poll of the roles, after which the page says so

const $ = (id) => document.getElementById(id);

const page = {
  offer: null, // what the server offers; null without a session
  run: "", // the shown run: empty for what runs now
  other: "", // the run to compare with; empty for none
  axis: 0, // place of x in a point: 0 images, 1 seconds
  now: null, curves: null, compared: null, samplesOf: "",
  heard: 0, // time of the last answer, of the page's clock, in ms
  polled: [0, 0], // newest poll of the roles, and when the page saw it
  chosen: "",
};

class NoSession extends Error {}

async function ask(path, { body, within = WAIT_MS } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json", "X-Session-Proof": page.offer?.proof ?? "" };
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, body: body === undefined ? undefined : JSON.stringify(body),
    signal: AbortSignal.timeout(within), credentials: "same-origin",
  });
  const found = await answer.json();
  if (answer.status === 401) throw new NoSession(found.error);
  if (!answer.ok) throw Object.assign(new Error(found.error), { refused: true });
  return found;
}

const part = (name, run) => ask(`view/${name}?run=${encodeURIComponent(run)}`);

// --- session ---------------------------------------------------------------------------------

async function begin() {
  const token = location.hash.slice(1);
  if (token && token !== "main") history.replaceState(null, "", location.pathname);
  try {
    page.offer = await ask("session", token && token !== "main" ? { body: { token } } : {});
    showOffer();
  } catch (error) {
    if (!(error instanceof NoSession)) return setTimeout(begin, NOW_MS);
    $("login").hidden = false;
    $("run").hidden = true;
    $("token").focus();
    link("wait", "not signed in");
  }
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    page.offer = await ask("session", { body: { token: $("token").value.trim() } });
    $("token").value = "";
    $("refused").textContent = "";
    showOffer();
    $("main").focus();
  } catch (error) {
    $("refused").textContent = error instanceof NoSession ? "This is not the token." : `No answer: ${error.message}`;
  }
});

function showOffer() {
  const { live, runs, operations } = page.offer;
  $("login").hidden = true;
  $("run").hidden = false;
  $("adds").hidden = !operations;
  $("faults").hidden = !operations;
  page.run = live ? "" : runs[0] ?? "";
  const options = (names, none) => [...none.map((text) => element("option", { value: "" }, text)), ...names.map((name) => element("option", { value: name }, name))];
  $("which").replaceChildren(...options(runs, live ? ["what runs now"] : []));
  $("other").replaceChildren(...options(runs, ["nothing"]));
  $("shown").hidden = runs.length + live < 2;
  $("compared").hidden = runs.length + live < 2;
  tick(0);
}

$("which").addEventListener("change", () => {
  Object.assign(page, { run: $("which").value, now: null, curves: null, samplesOf: "" });
  refresh(true);
});

$("other").addEventListener("change", async () => {
  page.other = $("other").value;
  page.compared = null;
  try {
    page.compared = page.other ? await part("curves", page.other) : null;
  } catch (error) {
    $("answer").textContent = error.message;
  }
  showCurves();
});

for (const choice of document.getElementsByName("axis")) {
  choice.addEventListener("change", () => { page.axis = Number(choice.value); showCurves(); });
}

// --- polls -----------------------------------------------------------------------------------

async function tick(number) {
  const rare = document.hidden || (page.run && page.now);
  if (!rare || number % RARELY === 0) await refresh(rare || number % CURVES_EVERY === 0);
  if (page.offer !== null) setTimeout(tick, NOW_MS, number + 1);
}

async function refresh(withCurves) {
  try {
    const run = page.run, now = await part("now", run);
    if (run !== page.run) return;
    page.now = Object.assign(now, partsOf(now.status));
    page.heard = performance.now();
    if (now.polled_at !== page.polled[0]) page.polled = [now.polled_at, performance.now()];
    if (withCurves || page.curves === null) {
      page.curves = await part("curves", run);
      showCurves();
    }
    showNow();
    if (now.samples_of && page.samplesOf !== `${run} ${now.samples_of}`) {
      showSamples(await part("samples", run));
      page.samplesOf = `${run} ${now.samples_of}`;
    }
    showLink();
  } catch (error) {
    if (error instanceof NoSession) {
      page.offer = null;
      begin();
      return;
    }
    if (error.refused) link("stale", error.message);
    else lost();
  }
}

// Return run and condition of a status, its roles with the lost ones, and all bundles with their owners.
function partsOf(status) {
  if (status === null) return { run: null, condition: null, roles: [], bundles: [] };
  const { run, condition, copies, store_copies: ofStores } = status;
  const lost = condition.lost.filter((each) => !status.roles.some((role) => role.node === each.node));
  const owners = [["", copies], ...Object.entries(ofStores)].filter(([, found]) => found);
  return {
    run, condition, roles: [...status.roles, ...lost.map((each) => ({ ...each, state: "lost" }))],
    bundles: owners.flatMap(([owner, found]) => found.bundles.map((bundle) => ({ ...bundle, owner }))),
  };
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && page.offer) refresh(true); });
window.addEventListener("resize", () => { if (page.now) { showCurves(); showMap(); } });

function link(state, text) {
  const place = $("link");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.state = state;
  document.body.classList.toggle("stale", state === "stale" || state === "lost");
}

function lost() {
  const since = page.heard ? `; the page is of ${clock((Date.now() - performance.now() + page.heard) / 1000)}` : "";
  link("lost", `no connection${since}`);
}

function showLink() {
  if (page.run) return link("over", "a past run");
  const { ended, run, polled_at: polled } = page.now;
  if (ended || (run && (run.phase === "finished" || run.phase === "failed"))) return link("over", ended || run.phase);
  const silent = (performance.now() - page.polled[1]) / 1000;
  if (!polled) return link("wait", "the roles start");
  if (silent > STALE_S) return link("stale", `no news of the roles for ${duration(silent)}`);
  link("live", "live");
}

// --- the moment ------------------------------------------------------------------------------

function showNow() {
  const { title, run, condition, dropped } = page.now;
  $("title").textContent = title || run?.id || "adam-async";
  document.title = `${$("title").textContent} · adam-async`;
  const facts = run ? [
    run.phase, run.epochs ? `epoch ${run.epoch} of ${run.epochs}` : `epoch ${run.epoch}`, run.images_per_s ? `${count(run.images_per_s)} images/s` : "",
    run.loss === null ? "" : `loss ${run.loss.toFixed(4)}`, run.test_accuracy === null ? "" : `test accuracy ${share(run.test_accuracy)}`,
    run.left_s === null ? "" : `${duration(run.left_s)} left`,
  ] : [page.now.ended];
  if (dropped) facts.push(`${dropped} events dropped`);
  $("facts").textContent = facts.filter(Boolean).join(" · ");
  $("moment").hidden = $("map").hidden = $("work").hidden = condition === null;
  if (condition) {
    const { survives } = condition;
    $("survives").textContent = survives ?? "–";
    $("survives").className = survives === 0 ? "none" : "";
    $("weakest").textContent = condition.weakest && `fewest: ${condition.weakest}`;
    $("limited").textContent = condition.limited_by || "–";
    $("rate").textContent = run?.images_per_s ? `${count(run.images_per_s)} images/s` : "";
    $("live").textContent = `${condition.live} / ${condition.taking_part}`;
    $("verdict").textContent = `${run?.replicas ? `of ${run.replicas} replicas; ` : ""}${condition.verdict}`;
    $("verdict").className = `small ${condition.verdict}`;
    list("reasons", condition.reasons.map((text) => element("li", {}, text)));
    showMap();
    showWork();
  }
  const done = run && run.epochs ? Math.min((run.epoch - 1 + (run.groups ? run.finished / run.groups : 0)) / run.epochs, 1) : 0;
  $("progress").hidden = !done;
  $("progress").setAttribute("aria-valuemax", 100);
  $("progress").setAttribute("aria-valuenow", Math.round(100 * done));
  $("progress").firstElementChild.style.width = `${100 * done}%`;
  showIncidents();
  showStores();
}

// Replace the items of a list only if their texts changed: a reader of the screen hears no repetition.
function list(id, items) {
  const place = $(id), text = items.map((item) => item.textContent).join("\n");
  if (place.dataset.text !== text) place.replaceChildren(...items);
  place.dataset.text = text;
}

function showCurves() {
  if (page.curves === null) return;
  const draw = (id, title, name, looks, facts) => {
    const lines = looks.map(([label, at, look]) => ({ name: label, points: page.curves[name], at, look }));
    if (page.compared) lines.push({ name: page.other, points: page.compared[name], at: 2, look: "s2 compared" });
    drawCurves($(id), { title, lines, axis: page.axis, ...facts });
  };
  draw("loss", "Loss", "loss", [["loss", 2, "s0"]], { format: (value) => Number(value.toPrecision(3)).toString(), from: 0 });
  draw("accuracy", "Accuracy", "accuracy", [["test", 2, "s0"], ["validation", 3, "s1"]], { format: share });
  draw("speed", "Images per second", "rate", [["rate", 2, "s0"]], { format: count, from: 0 });
  draw("staleness", "Staleness of pushes", "staleness", [["mean", 2, "s0"]], { format: (value) => count(value), from: 0 });
}

const KINDS = { lost: "lost", silent: "no answer", failover: "failover", copies: "lacks copies", pushes: "pushes wait", wait: "waits" };
const MOST_ROWS = 12;

function showIncidents() {
  const { incidents, notes, at: newest } = page.now;
  $("timeline").hidden = !incidents.length && !notes.length;
  const rows = incidents.slice(-MOST_ROWS).reverse();
  const first = Math.min(...rows.map((each) => each.began)), whole = Math.max(newest - first, 1);
  const items = rows.map((each) => {
    const open = each.lasted_s === null, lasted = open ? Math.max(newest - each.began, 0) : each.lasted_s;
    const bar = element("i");
    bar.style.left = `${(100 * (each.began - first)) / whole}%`;
    bar.style.width = `${(100 * lasted) / whole}%`;
    const words = [each.text, open && each.deadline_s !== null ? `at most ${duration(each.deadline_s)}` : "", open ? each.cure : ""].filter(Boolean).join("; ");
    return element("li", { class: `${each.kind}${open ? " open" : ""}`, "data-subject": each.subject },
      element("span", {}, `${each.subject} ${KINDS[each.kind]}`), element("span", { class: "bar", title: clock(each.began) }, bar),
      element("span", { class: "s" }, open ? `for ${duration(lasted)}` : `${duration(lasted)}`), words ? element("p", {}, words) : null);
  });
  if (!items.length) items.push(element("li", { class: "none" }, "No role was lost."));
  if (incidents.length > rows.length) items.push(element("li", { class: "none" }, `${incidents.length - rows.length} earlier ones`));
  $("incidents").replaceChildren(...items);
  $("log").hidden = !notes.length;
  list("notes", notes.slice().reverse().map(([at, text]) => element("li", {}, at > 1e9 ? element("time", {}, clock(at)) : null, text)));
}

function table(caption, heads, rows) {
  const cell = (tag, value, n) => value instanceof Element ? element(tag, {}, value) : element(tag, typeof value === "number" || heads[n].endsWith("#") ? { class: "number" } : {}, `${value}`);
  return element("table", {}, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col", ...(head.endsWith("#") ? { class: "number" } : {}) }, head.replace("#", ""))))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value, n) => cell(n ? "td" : "th", value, n))))));
}

function showWork() {
  const { workers, condition, staleness } = page.now;
  const shares = ["compute", "servers", "images", "clock"];
  const bar = (worker) => {
    const place = element("div", { class: "shares", role: "img", "aria-label": shares.map((name) => `${name} ${share(worker[name])}`).join(", ") });
    for (const name of shares) {
      const piece = element("i", { class: name });
      piece.style.width = `${100 * Math.min(worker[name], 1)}%`;
      place.append(piece);
    }
    return place;
  };
  const legend = element("span", {}, "time goes to", ...["computing", "servers", "images", "clocks"].flatMap((text, n) => [element("i", { class: `square ${shares[n]}` }), text]));
  $("workers").replaceChildren(table(legend, ["worker", "replica#", "images/s#", "recently", "time", "lag#", "staleness#"], workers.map((worker) => [
    worker.node, worker.replica, count(worker.images_per_s), spark(worker.recent), bar(worker), worker.lag ?? "–", worker.staleness ?? "–",
  ])));
  if (staleness.length) {
    const total = staleness.reduce((sum, [, pushes]) => sum + pushes, 0) || 1;
    $("workers").append(element("p", { class: "small" }, `pushes by staleness: ${staleness.filter(([, pushes]) => pushes).map(([range, pushes]) => `${range}: ${share(pushes / total)}`).join("   ")}`));
  }
  list("waits", condition.waits.map((each) => element("li", {}, `${each.who} waits for ${each.what}, ${each.deadline_s === null ? "without a deadline" : `at most ${duration(each.deadline_s)}`}. Cure: ${each.cure}.`)));
}

function showStores() {
  const { stores } = page.now;
  $("stores").hidden = !stores.length;
  $("store-list").replaceChildren(...stores.map((store) => element("div", { class: "scroll", tabindex: 0 }, table(
    `${store.name || "the run"}: ${store.shards} shards on ${store.servers} servers, ${bytes(store.bytes)}, versions ${store.first_version} to ${store.last_version}, ${store.refused} pushes refused, ${store.duplicates} duplicates, ${store.waiting} requests wait`,
    ["client", "clock#", "pushes#", "staleness#"], store.clients.map((client) => [client.name, client.clock ?? "–", client.pushes, client.staleness]),
  ))));
}

function showSamples(found) {
  $("samples").hidden = found === null;
  if (found === null) return;
  $("samples-title").textContent = `Predictions ${found.is_later ? "some time " : ""}after epoch ${found.epoch}`;
  $("first").replaceChildren(...found.first.map((image) => sample(image, found)));
  $("mistakes").replaceChildren(...found.mistakes.map((image) => sample(image, found)));
}

// --- roles and operations --------------------------------------------------------------------

const roleMap = new RoleMap($("roles"), choose);

function detail(role) {
  if (role.state === "lost") return "lost";
  if (silentRoles().has(role.node)) return "no answer";
  const worker = page.now.workers.find((each) => each.node === role.node);
  if (worker) return `${role.state}, ${count(worker.images_per_s)}/s`;
  if (role.role !== "ps") return role.state;
  const holds = page.now.bundles.filter((bundle) => bundle.in_sync.includes(role.node));
  const first = holds.filter((bundle) => bundle.primary === role.node).length;
  const joins = page.now.bundles.filter((bundle) => bundle.joining.includes(role.node)).length;
  return `${first} primary, ${holds.length - first} copy${joins ? `, ${joins} joins` : ""}`;
}

const silentRoles = () => new Set(page.now.incidents.filter((each) => each.kind === "silent" && each.lasted_s === null).map((each) => each.subject));

function showMap() {
  const { roles, links, bundles } = page.now;
  roleMap.draw({ roles, links, bundles, silent: silentRoles(), detail });
  $("links").replaceChildren(table("busiest links", ["from", "to", "per second#", "in all#"], links.slice(0, 20).map(([from, to, all, rate]) => [from, to, bytes(rate), bytes(all)])));
  $("bundles").replaceChildren(table("copies of shards", ["bundle", "primary", "other copies", "joins"], bundles.map((each) => [
    each.owner ? `${each.home} of ${each.owner}` : each.home, each.primary || "lost", each.in_sync.slice(1).join(", ") || "–", each.joining.join(", ") || "–",
  ])));
}

function choose(node) {
  const role = page.now.roles.find((each) => each.node === node);
  page.chosen = node;
  $("role-title").textContent = node;
  const facts = [["state", detail(role)], ["machine", role.host], ["process", role.pid || ""], ["memory", role.peak_rss_mb ? `${Math.round(role.peak_rss_mb)} MB` : ""],
    ["age", role.age_s ? duration(role.age_s) : ""], ["lost at", role.since ? clock(role.since) : ""], ["notice", role.notice]];
  $("role-facts").replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, `${value}`)]));
  $("faults").hidden = !page.offer.operations || role.state === "lost" || !["controller", "data", "ps", "worker"].includes(role.role);
  $("role").showModal();
}

async function operate(body, words) {
  $("answer").textContent = words;
  try {
    $("answer").textContent = (await ask("operate", { body: { ...body, run: page.now.run?.id ?? "" }, within: 60000 })).text;
  } catch (error) {
    $("answer").textContent = `Refused: ${error.message}`;
  }
}

for (const button of document.querySelectorAll("[data-add]")) {
  button.addEventListener("click", () => operate({ action: "add", role: button.dataset.add }, "starts a role"));
}
for (const button of document.querySelectorAll("[data-fault]")) {
  button.addEventListener("click", () => {
    const action = button.dataset.fault;
    $("role").close();
    operate({ action, node: page.chosen, seconds: action === "freeze" ? Number($("seconds").value) : 0 }, `asks to ${action} ${page.chosen}`);
  });
}

begin();
