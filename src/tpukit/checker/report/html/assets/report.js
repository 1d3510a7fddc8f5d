"use strict";
// The timeline: drawn on a canvas in place of the picture that stands there without scripts.
(() => {
  const seconds = (ns) => {
    const steps = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
    const [size, unit] = steps.find(([least]) => Math.abs(ns) >= least) ?? steps[3];
    return `${Number((ns / size).toPrecision(4))} ${unit}`;
  };
  const binary = (amount) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    for (; amount >= 1024 && power < units.length - 1; power++) amount /= 1024;
    return `${Number(amount.toPrecision(4))} ${units[power]}`;
  };
  const flops = (amount) => {
    const steps = [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]];
    const [size, unit] = steps.find(([least]) => amount >= least) ?? steps[3];
    return `${Number((amount / size).toPrecision(4))} ${unit}`;
  };

  const view = document.getElementById("timeline-view");
  const { timeline } = JSON.parse(document.getElementById("page-data").textContent);
  if (view && timeline) drawTimeline(view, timeline);

  function drawTimeline(frame, { tracks, texts, causes, memory, spans: rows }) {
    const AXIS = 24, GAP = 10, LABEL = 18, MEMORY = 56, LEAST_VIEW_NS = 200;
    let top = AXIS;
    for (const track of tracks) {
      track.top = top + LABEL;
      top = track.top + track.rows * track.rowHeight + GAP;
    }
    const memoryTop = top + LABEL;
    const height = memory.length ? memoryTop + MEMORY + GAP : top;
    const fullest = Math.max(1, ...memory.map(([, , amount]) => amount));
    const spans = rows.map(
      ([track, row, start, length, foldedStart, foldedLength, cause, name, op, work, moved, times, iterations]) => ({
        track, row, start, length, foldedStart, foldedLength, times, iterations, work, moved,
        cause: texts[cause], name: texts[name], op: texts[op],
      }),
    );
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    frame.replaceChildren(canvas);
    const details = document.getElementById("timeline-details");
    const fold = document.getElementById("timeline-fold");
    const pen = canvas.getContext("2d");
    let colors = {}, width = 0, from = 0, to = 1, chosen = null, hovered = null, waiting = false;

    const placeOf = (span) => (fold.checked ? span.foldedStart : span.start);
    const lengthOf = (span) => (fold.checked ? span.foldedLength : span.length);
    const whole = () => Math.max(1, ...spans.map((span) => placeOf(span) + lengthOf(span)));
    const across = (ns) => ((ns - from) / (to - from)) * width;
    const topOf = (span) => tracks[span.track].top + span.row * tracks[span.track].rowHeight;

    const readColors = () => {
      const probe = document.createElement("span");
      frame.append(probe);
      const resolve = (value) => {
        probe.style.color = value;
        return getComputedStyle(probe).color;
      };
      colors = Object.fromEntries(Object.keys(causes).map((cause) => [cause, resolve(`var(--${cause})`)]));
      for (const name of ["ink", "soft", "line", "page"]) colors[name] = resolve(`var(--${name})`);
      probe.remove();
    };

    const draw = () => {
      waiting = false;
      const ratio = window.devicePixelRatio || 1;
      width = frame.clientWidth;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      drawAxis();
      for (const track of tracks) {
        pen.fillStyle = colors.soft;
        pen.fillText(track.title, 8, track.top - LABEL / 2);
      }
      for (const span of spans) drawSpan(span);
      if (memory.length) drawMemory();
      if (chosen) outline(chosen, colors.ink, 2);
      if (hovered && hovered !== chosen) outline(hovered, colors.ink, 1);
    };
    const later = () => {
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(draw);
      }
    };
    const drawAxis = () => {
      const rough = (to - from) / Math.max(2, width / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
      pen.fillStyle = colors.soft;
      pen.strokeStyle = colors.line;
      pen.lineWidth = 1;
      for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
        const x = Math.round(across(at)) + 0.5;
        pen.beginPath();
        pen.moveTo(x, AXIS);
        pen.lineTo(x, height);
        pen.stroke();
        const words = at ? seconds(at) : "0";
        if (x + 8 + pen.measureText(words).width < width) pen.fillText(words, x + 4, AXIS / 2);
      }
    };
    const drawSpan = (span) => {
      const left = across(placeOf(span)), right = across(placeOf(span) + lengthOf(span));
      if (right < 0 || left > width) return;
      const x = Math.max(left, -1), wide = Math.max(Math.min(right, width + 1) - x, 0.6);
      const tall = tracks[span.track].rowHeight;
      pen.fillStyle = colors[span.cause] ?? colors.overhead;
      pen.fillRect(x, topOf(span), wide > 3 ? wide - 0.7 : wide, tall - 1);
      if (tall < 14 || wide < 34) return;
      const words = span.iterations > 1
        ? `${span.iterations} × ${seconds(span.length / span.iterations)}  ${span.name}`
        : span.name;
      pen.save();
      pen.beginPath();
      pen.rect(x, topOf(span), wide - 4, tall);
      pen.clip();
      pen.fillStyle = span.cause === "loop" ? colors.ink : colors.page;
      pen.fillText(words, x + 5, topOf(span) + tall / 2);
      pen.restore();
    };
    const drawMemory = () => {
      const floor = memoryTop + MEMORY;
      pen.fillStyle = colors.soft;
      pen.fillText("Live HBM over the step [compiler]", 8, memoryTop - LABEL / 2);
      pen.fillStyle = colors.matrix;
      pen.globalAlpha = 0.45;
      pen.beginPath();
      pen.moveTo(across(0), floor);
      let level = floor;
      for (const [at, foldedAt, amount] of memory) {
        const x = across(fold.checked ? foldedAt : at);
        pen.lineTo(x, level);
        level = floor - (amount / fullest) * MEMORY;
        pen.lineTo(x, level);
      }
      pen.lineTo(across(whole()), level);
      pen.lineTo(across(whole()), floor);
      pen.fill();
      pen.globalAlpha = 1;
    };
    const outline = (span, color, thick) => {
      pen.strokeStyle = color;
      pen.lineWidth = thick;
      const left = Math.max(across(placeOf(span)), -2);
      const right = Math.min(across(placeOf(span) + lengthOf(span)), width + 2);
      pen.strokeRect(left, topOf(span), Math.max(right - left, 2), tracks[span.track].rowHeight - 1);
    };

    const tell = (span) => {
      const once = `${seconds(span.length)}${span.times > 1 ? ` × ${span.times} = ${seconds(span.length * span.times)}` : ""}`;
      const lines = [`${span.name}  ${once}  [model]`];
      if (span.iterations > 1) lines.push(`a loop of ${span.iterations} iterations, ${seconds(span.length / span.iterations)} each`);
      else lines.push(`bound by ${causes[span.cause] ?? span.cause}, starts at ${seconds(span.start)}`);
      const amounts = [];
      if (span.work) amounts.push(flops(span.work));
      if (span.moved) amounts.push(binary(span.moved));
      if (span.work && span.length) amounts.push(`${(span.work / span.length / 1e3).toPrecision(3)} TFLOP/s`);
      if (amounts.length) lines[1] += `, ${amounts.join(", ")}`;
      if (span.op) lines.push(span.op);
      details.textContent = lines.join("\n");
    };
    const show = (start, end) => {
      const limit = whole();
      const size = Math.min(Math.max(end - start, LEAST_VIEW_NS), limit);
      from = Math.min(Math.max(0, start), limit - size);
      to = from + size;
      later();
    };
    const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
    const reveal = (span) => {
      const place = placeOf(span), size = to - from;
      if (place < from || place + lengthOf(span) > to) {
        const room = Math.max(size, lengthOf(span) * 1.2);
        show(place - room * 0.1, place + room * 0.9);
      }
    };
    const choose = (span) => {
      chosen = span;
      if (span) tell(span);
      later();
    };
    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      let best = null, nearest = 4;
      for (const span of spans) {
        const top = topOf(span);
        if (y < top || y >= top + tracks[span.track].rowHeight) continue;
        const left = across(placeOf(span)), right = across(placeOf(span) + lengthOf(span));
        const apart = x < left ? left - x : x > right ? x - right : 0;
        if (apart < nearest) [best, nearest] = [span, apart];
      }
      return best;
    };

    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from, to, moved: false };
      canvas.setPointerCapture(event.pointerId);
      frame.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const shift = event.clientX - drag.x;
        drag.moved ||= Math.abs(shift) > 3;
        frame.classList.toggle("dragging", drag.moved);
        const ns = (shift / width) * (drag.to - drag.from);
        if (drag.moved) show(drag.from - ns, drag.to - ns);
        return;
      }
      const span = under(event);
      if (span === hovered) return;
      hovered = span;
      if (span) tell(span);
      else if (chosen) tell(chosen);
      later();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) choose(under(event));
      drag = null;
      frame.classList.remove("dragging");
    });
    canvas.addEventListener("pointercancel", () => {
      drag = null;
      frame.classList.remove("dragging");
    });
    canvas.addEventListener("pointerleave", () => {
      hovered = null;
      later();
    });
    canvas.addEventListener("dblclick", (event) => {
      const span = under(event);
      if (span) show(placeOf(span) - lengthOf(span) * 0.05, placeOf(span) + lengthOf(span) * 1.05);
    });
    // A page must scroll past the timeline: the wheel belongs to it only once it was clicked.
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== frame && !event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const at = from + ((event.clientX - box.left) / width) * (to - from);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const ns = (event.deltaX / width) * (to - from);
        show(from + ns, to + ns);
      } else zoom(Math.exp(event.deltaY / 400), at);
    }, { passive: false });

    const inTrack = (track, row) =>
      spans.filter((span) => span.track === track && (row === undefined || span.row === row))
        .sort((a, b) => placeOf(a) - placeOf(b) || a.row - b.row);
    const step = (by) => {
      if (!chosen) return choose(inTrack(0)[0]);
      const all = inTrack(chosen.track, chosen.row);
      const next = all[all.indexOf(chosen) + by];
      if (next) {
        choose(next);
        reveal(next);
      }
    };
    const climb = (by) => {
      if (!chosen) return step(1);
      const lines = tracks.flatMap((track, number) =>
        Array.from({ length: track.rows }, (_, row) => [number, row]));
      let line = lines.findIndex(([track, row]) => track === chosen.track && row === chosen.row);
      const middle = placeOf(chosen);
      for (line += by; line >= 0 && line < lines.length; line += by) {
        const all = inTrack(...lines[line]);
        if (!all.length) continue;
        const next = all.reduce((a, b) =>
          Math.abs(placeOf(a) - middle) <= Math.abs(placeOf(b) - middle) ? a : b);
        choose(next);
        return reveal(next);
      }
    };
    const actions = { in: () => zoom(0.5), out: () => zoom(2), reset: () => show(0, whole()) };
    const keys = {
      "+": actions.in, "=": actions.in, "-": actions.out, "0": actions.reset,
      ArrowRight: () => step(1), ArrowLeft: () => step(-1),
      ArrowDown: () => climb(1), ArrowUp: () => climb(-1),
      Enter: () => chosen && show(placeOf(chosen) - lengthOf(chosen) * 0.05, placeOf(chosen) + lengthOf(chosen) * 1.05),
      Escape: () => choose(null),
    };
    frame.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
    fold.addEventListener("change", () => show(0, whole()));
    new ResizeObserver(later).observe(frame);
    document.addEventListener("themechange", () => {
      readColors();
      later();
    });
    readColors();
    show(0, whole());
    draw();
  }
})();
