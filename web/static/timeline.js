"use strict";
/* The timeline: a drawn window of the logs. Times are µs after the first record of all lanes.

   The server is asked for the visible window and half of it on either side, one request at a time; meanwhile the known
   data is drawn. The server sends counts for a wide window, messages for a narrow one: never more than some thousand. */
(() => {
  const canvas = document.getElementById("timeline");
  if (!canvas) return;
  const LANE = 74, TOP = 26, LEFT = 108, RIGHT = 16, GAP = 54, RADIUS = 3, LETTER = 6.2;
  const { path, lanes: laneText, query } = canvas.dataset;
  const lanes = laneText.split(",");
  const origin = BigInt(canvas.dataset.first);
  const whole = Math.max(1, Number(BigInt(canvas.dataset.last) - origin) / 1000);
  const view = {
    from: canvas.dataset.from === "" ? -whole * 0.01 : Number(canvas.dataset.from),
    to: canvas.dataset.to === "" ? whole * 1.01 + 1 : Number(canvas.dataset.to),
  };
  const what = document.getElementById("what"), range = document.getElementById("range");
  const list = document.getElementById("list"), fold = document.getElementById("fold");
  const context = canvas.getContext("2d");
  const resting = what.textContent;
  let known = null, wanted = null, asking = false, dots = [], selection = null, segments = [], width = 0;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function text(us) { return new Date(Number(origin / 1000000n) + us / 1000).toISOString().replace("T", " ").slice(0, 23); }
  function tick(us, step) {  // to the µs where the next one is less than a ms away
    if (step >= 1e3) return text(us).slice(11);
    const whole = origin / 1000n + BigInt(Math.floor(us));
    return new Date(Number(whole / 1000n)).toISOString().slice(11, 23) + String(whole % 1000n).padStart(3, "0");
  }
  function span(us) {
    if (us < 1e3) return `${us.toFixed(0)} µs`;
    if (us < 1e6) return `${(us / 1e3).toFixed(1)} ms`;
    if (us < 60e6) return `${(us / 1e6).toFixed(2)} s`;
    if (us < 3600e6) return `${(us / 60e6).toFixed(1)} min`;
    return us < 86400e6 ? `${(us / 3600e6).toFixed(1)} h` : `${(us / 86400e6).toFixed(1)} d`;
  }

  /* Find the segments of the window in which something happens; each gap between them takes GAP pixels. */
  function fit() {
    segments = [];
    const inner = width - LEFT - RIGHT;
    if (known && fold.checked && known.lanes.some((lane) => lane.counts)) {
      const count = Math.max(...known.lanes.map((lane) => (lane.counts || []).length));
      const step = (known.to - known.from) / count;
      for (let i = 0; i < count; i++) {
        if (!known.lanes.some((lane) => lane.counts && lane.counts[i])) continue;
        const from = Math.max(view.from, known.from + (i - 0.5) * step), to = Math.min(view.to, known.from + (i + 1.5) * step);
        if (to <= from) continue;
        const last = segments[segments.length - 1];
        if (last && from <= last.to + 4 * step) last.to = Math.max(to, last.to);
        else segments.push({ from, to });
      }
    }
    if (!segments.length) segments = [{ from: view.from, to: view.to }];
    const busy = segments.reduce((sum, one) => sum + one.to - one.from, 0);
    const room = Math.max(40, inner - GAP * (segments.length - 1));
    let x = LEFT;
    for (const one of segments) {
      one.x = x;
      one.width = room * (one.to - one.from) / busy;
      x += one.width + GAP;
    }
  }
  function xOf(us) {
    for (const one of segments) {
      if (us < one.from) return one.x - GAP / 2;
      if (us <= one.to) return one.x + one.width * (us - one.from) / (one.to - one.from);
    }
    return width - RIGHT + 4;
  }
  function usOf(x) {
    for (const one of segments) {
      if (x < one.x) return one.from;
      if (x <= one.x + one.width) return one.from + (one.to - one.from) * (x - one.x) / one.width;
    }
    return view.to;
  }
  const yOf = (lane) => TOP + LANE * lane + LANE * 0.55;

  function draw() {
    const ratio = devicePixelRatio || 1, height = TOP + LANE * lanes.length + 8;
    width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.setAttribute("height", Math.round(height * ratio));
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const ink = css("--ink"), dim = css("--dim"), line = css("--line"), accent = css("--accent"), bad = css("--bad");
    fit();
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = css("--bg");
    segments.slice(1).forEach((one) => context.fillRect(one.x - GAP + 3, 0, GAP - 6, height));
    context.fillStyle = dim;
    context.textAlign = "center";
    segments.slice(1).forEach((one, i) => context.fillText(span(one.from - segments[i].to), one.x - GAP / 2, height - 12));
    context.textAlign = "start";
    context.strokeStyle = line;
    for (const one of segments) {
      const ticks = Math.floor(one.width / 140), step = (one.to - one.from) / ticks;
      for (let i = 0; i < ticks; i++) {
        const us = one.from + step * i, x = xOf(us);
        context.fillText(tick(us, step), x + 3, 11);
        context.beginPath();
        context.moveTo(x, 4);
        context.lineTo(x, height);
        context.stroke();
      }
    }
    lanes.forEach((name, lane) => {
      context.beginPath();
      for (const one of segments) { context.moveTo(one.x, yOf(lane)); context.lineTo(one.x + one.width, yOf(lane)); }
      context.stroke();
      context.fillStyle = ink;
      context.fillText(name.length > 15 ? `${name.slice(0, 14)}…` : name, 10, yOf(lane));
    });
    dots = [];
    if (known) {
      const most = Math.max(1, ...known.lanes.flatMap((lane) => lane.counts || []));
      known.lanes.forEach((lane, number) => {
        if (lane.problem) {
          context.fillStyle = bad;
          context.fillText(lane.problem.slice(0, 120), LEFT, yOf(number) - 12);
        } else if (lane.messages) {
          drawMessages(lane.messages, number, accent);
        }
        if (lane.problem) return;
        if (!(lane.messages ? dots.some((dot) => dot.lane === number) : lane.records)) {
          context.fillStyle = dim;
          context.fillText(empty(lane), LEFT + 6, yOf(number) - 12);
        } else if (!lane.messages) {
          const step = (known.to - known.from) / lane.counts.length;
          context.fillStyle = accent;
          lane.counts.forEach((count, i) => {
            const from = known.from + i * step;
            if (!count || from + step < view.from || from > view.to) return;
            const tall = Math.max(2, (LANE - 30) * Math.log1p(count) / Math.log1p(most)), x = xOf(from);
            context.fillRect(x, yOf(number) - tall / 2, Math.max(1, xOf(from + step) - x - 0.5), tall);
          });
        }
      });
    }
    if (selection) {
      context.fillStyle = accent;
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(selection.from, selection.to), 0, Math.abs(selection.to - selection.from), height);
      context.globalAlpha = 1;
    }
    const counted = known && !known.lanes.some((lane) => lane.messages);
    range.textContent = `${text(view.from)} to ${text(view.to)} UTC, ${span(view.to - view.from)}` +
      (counted ? "; too many for single messages: bars are all records" : "");
    list.href = `${path.replace(/timeline\.json$/, "messages")}?at=${encodeURIComponent(text(Math.max(0, view.from)))}`;
  }
  function drawMessages(messages, lane, color) {
    const crowd = messages.length > 1500 ? 0.25 : messages.length > 300 ? 0.5 : 0.85;
    context.strokeStyle = color;
    context.fillStyle = color;
    context.globalAlpha = crowd;
    context.beginPath();
    for (const one of messages) {
      const [, , time, sent, from] = one;
      if (time < view.from || (sent ?? time) > view.to) continue;
      const x = xOf(time), y = yOf(lane);
      if (from !== null && from !== lane && sent !== null) { context.moveTo(xOf(Math.max(sent, view.from)), yOf(from)); context.lineTo(x, y); }
      dots.push({ x, y, lane, one });
    }
    context.stroke();
    context.globalAlpha = Math.min(1, crowd + 0.2);
    context.beginPath();
    for (const { x, y, lane: its } of dots) if (its === lane) { context.moveTo(x + RADIUS, y); context.arc(x, y, RADIUS, 0, 7); }
    context.fill();
    context.globalAlpha = 1;
    label(lane);
  }
  /* Draw a message's label above its dot; of close ones only that of the first that is not the clock's. */
  function label(lane) {
    context.fillStyle = css("--ink");
    const groups = [];
    for (const dot of dots.filter((one) => one.lane === lane).sort((one, other) => one.x - other.x)) {
      const last = groups[groups.length - 1];
      if (last && dot.x - last[0].x < 9 * LETTER) last.push(dot);
      else groups.push([dot]);
    }
    groups.forEach((group, i) => {
      const { x, y } = group[0], { one } = group.find((dot) => !dot.one[6].startsWith("the clock")) || group[0];
      const next = i + 1 < groups.length ? groups[i + 1][0].x : width - RIGHT;
      const letters = Math.min(40, Math.floor((next - x - 4) / LETTER));
      if (letters >= 5) context.fillText(one[6].length > letters ? `${one[6].slice(0, letters - 1)}…` : one[6], x - RADIUS, y - 14);
    });
  }
  function empty(lane) {
    if (lane.records && lane.messages) return lane.messages.length ? "its messages are outside of this window" : "no message here passes the filter";
    return lane.records ? "" : lane.all ? "no message in this time; its log has others" : "its log has no record";
  }

  let due = 0;
  function redraw() { if (!due) due = requestAnimationFrame(() => { due = 0; draw(); }); }
  function changed() {
    view.to = Math.max(view.to, view.from + 10);
    redraw();
    const size = view.to - view.from;
    const covered = known && view.from >= known.from && view.to <= known.to && size > (known.to - known.from) / 4;
    if (!covered) ask();
  }
  async function ask() {
    const size = view.to - view.from;
    wanted = { from: Math.max(0, Math.floor(view.from - size / 2)), to: Math.ceil(view.to + size / 2) };
    if (asking) return;
    asking = true;
    canvas.setAttribute("aria-busy", "true");
    try {
      while (wanted) {
        const { from, to } = wanted;
        wanted = null;
        const answer = await fetch(`${path}?lanes=${encodeURIComponent(laneText)}&origin=${origin}&from=${from}&to=${to}&${query}`);
        if (!answer.ok) { what.textContent = `the server says ${answer.status}: ${(await answer.text()).slice(0, 80)}`; break; }
        known = { from, to, lanes: (await answer.json()).lanes };
        redraw();
      }
    } finally {
      asking = false;
      canvas.removeAttribute("aria-busy");
    }
  }
  function zoom(factor, at) {
    const middle = at ?? (view.from + view.to) / 2;
    view.from = middle - (middle - view.from) * factor;
    view.to = middle + (view.to - middle) * factor;
    changed();
  }
  function move(share) {
    const by = (view.to - view.from) * share;
    view.from += by;
    view.to += by;
    changed();
  }
  function nearest(x, y) {
    let best = null, least = 100;
    for (const dot of dots) {
      const far = (dot.x - x) ** 2 + (dot.y - y) ** 2;
      if (far < least) { least = far; best = dot; }
    }
    return best;
  }
  const pageOf = (dot) => `/i/${encodeURIComponent(lanes[dot.lane])}/m/${dot.one[0]}/${dot.one[1]}`;

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, from: view.from, to: view.to, moved: false, chooses: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      drag.moved ||= Math.abs(event.offsetX - drag.x) > 3;
      if (drag.chooses) selection = { from: drag.x, to: event.offsetX };
      else {
        const by = (drag.to - drag.from) * (drag.x - event.offsetX) / Math.max(1, width - LEFT - RIGHT);
        view.from = drag.from + by;
        view.to = drag.to + by;
        changed();
      }
      redraw();
      return;
    }
    const dot = nearest(event.offsetX, event.offsetY);
    canvas.classList.toggle("over", dot !== null);
    what.textContent = dot ? `${lanes[dot.lane]} ${dot.one[0]}:${dot.one[1]}  ${text(dot.one[2])}  ${dot.one[6]}` +
      (dot.one[3] === null ? "" : `  ${span(dot.one[2] - dot.one[3])} on its way`) : resting;
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && drag.chooses && drag.moved) {
      [view.from, view.to] = [usOf(Math.min(drag.x, event.offsetX)), usOf(Math.max(drag.x, event.offsetX))];
      changed();
    } else if (drag && !drag.moved) {
      const dot = nearest(event.offsetX, event.offsetY);
      if (dot) location.href = pageOf(dot);
    }
    drag = selection = null;
    redraw();
  });
  canvas.addEventListener("pointercancel", () => { drag = selection = null; redraw(); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / width);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, usOf(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const does = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "-": () => zoom(1 / 0.6) }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.5));
  document.getElementById("out").addEventListener("click", () => zoom(2));
  document.getElementById("all").addEventListener("click", () => { view.from = -whole * 0.01; view.to = whole * 1.01 + 1; changed(); });
  fold.addEventListener("change", redraw);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  changed();
})();
