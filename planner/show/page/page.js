"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);

  // --- light and dark -----------------------------------------------------------------------------------------
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; };
  $("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
    timeline.recolor();
  });
  system.addEventListener("change", () => { nameTheme(); timeline.recolor(); });
  nameTheme();

  // --- search ---------------------------------------------------------------------------------------------------
  const rows = [...$("lines").rows].map((row) => [row, row.textContent.toLowerCase()]);
  $("search").addEventListener("input", () => {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    $("found").textContent = words.length ? `${count} of ${rows.length} lines` : "";
  });

  // --- words ----------------------------------------------------------------------------------------------------
  function seconds(value) {
    for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
      if (Math.abs(value) >= factor) return `${(value / factor).toPrecision(4)} ${unit}`;
    }
    return value ? `${(value * 1e9).toPrecision(3)} ns` : "0 s";
  }

  const round = (value) => seconds(value).replace(/\.0+(?= )|(\.\d*?)0+(?= )/, "$1");

  // --- the timeline ---------------------------------------------------------------------------------------------
  const timeline = (() => {
    const { kinds, counts, tail } = data.timeline, canvas = $("canvas"), context = canvas.getContext("2d");
    const stages = counts.length, firsts = [], whole = data.timeline.step_seconds;
    counts.reduce((sum, count, stage) => { firsts[stage] = sum; return sum + count; }, 0);
    const total = counts.reduce((sum, count) => sum + count, 0);
    const left = 34, bottom = 20;
    let start = null, kindOf, microbatch;        // of each pass, stage after stage
    let from = 0, to = whole, chosen = null;     // seconds in sight; [stage, pass]
    let width = 0, rowHeight = 0, colors = {}, waiting = false;

    const keyOf = (kind) => ({ F: "forward", B: "backward", I: "input", W: "weight" })[kinds[kind].letter];
    const end = (pass) => start[pass] + kinds[kindOf[pass]].seconds;

    async function unpack() {
      const packed = Uint8Array.from(atob(data.timeline.passes), (c) => c.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
      const bytes = await new Response(stream).arrayBuffer();
      const waits = new Float32Array(bytes, 0, total);
      microbatch = new Uint32Array(bytes, 4 * total, total);
      kindOf = new Uint16Array(bytes, 8 * total, total);
      const begin = new Float64Array(total);
      for (let stage = 0; stage < stages; stage++) {
        let now = 0;
        for (let pass = firsts[stage]; pass < firsts[stage] + counts[stage]; pass++) {
          begin[pass] = now + waits[pass];
          now = begin[pass] + kinds[kindOf[pass]].seconds;
        }
      }
      start = begin;
    }

    // the first pass of a stage that ends after `time`
    function passAt(stage, time) {
      let low = firsts[stage], high = firsts[stage] + counts[stage];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (end(middle) <= time) low = middle + 1; else high = middle;
      }
      return low;
    }

    function recolor() {
      for (const item of $("colors").children) {
        const [r, g, b] = getComputedStyle(item.querySelector("rect")).fill.match(/[\d.]+/g).map(Number);
        const shade = (share) => (255 << 24) | ((b * share) << 16) | ((g * share) << 8) | (r * share);
        colors[item.dataset.key] = [shade(1) >>> 0, shade(0.82) >>> 0];
      }
      draw();
    }

    // every stage is one row of pixels of an image, which is then stretched: the work grows with the width, not the passes
    function image(pixels) {
      const picture = new ImageData(pixels, stages), cells = new Uint32Array(picture.data.buffer);
      const each = (to - from) / pixels, stripes = kinds[0] ? kinds[0].seconds > 3 * each : false;
      for (let stage = 0; stage < stages; stage++) {
        const stop = firsts[stage] + counts[stage], row = stage * pixels;
        let pass = passAt(stage, from);
        for (let x = 0; x < pixels; x++) {
          const time = from + (x + 0.5) * each;
          while (pass < stop && end(pass) <= time) pass++;
          if (pass < stop && start[pass] <= time) {
            cells[row + x] = colors[keyOf(kindOf[pass])][stripes ? microbatch[pass] & 1 : 0];
          } else {
            const [part, odd] = tailAt(stage, time);
            if (part) cells[row + x] = colors.tail[odd];
          }
        }
      }
      return picture;
    }

    function tailAt(stage, time) {
      let at = data.timeline.pipeline_seconds, odd = 0;
      for (const part of tail[stage]) {
        if (time >= at && time < at + part[1]) return [part, odd];
        at += part[1];
        odd = 1 - odd;
      }
      return [null, 0];
    }

    function draw() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; paint(); });
    }

    function paint() {
      const ratio = devicePixelRatio || 1, style = getComputedStyle(canvas);
      width = canvas.clientWidth;
      rowHeight = Math.max(6, Math.min(28, Math.floor(420 / stages)));
      const height = rowHeight * stages + bottom;
      canvas.style.height = `${height}px`;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      if (!start) return;
      const pixels = Math.max(1, Math.round((width - left) * ratio));
      const buffer = document.createElement("canvas");
      buffer.width = pixels;
      buffer.height = stages;
      buffer.getContext("2d").putImageData(image(pixels), 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(buffer, left, 0, width - left, rowHeight * stages);
      context.fillStyle = style.backgroundColor;
      for (let stage = 1; stage < stages; stage++) context.fillRect(left, stage * rowHeight - 1, width - left, 1);
      context.fillStyle = context.strokeStyle = style.color;
      context.font = "11px system-ui, sans-serif";
      labels();
      axis(height);
      if (chosen) {
        const [stage, pass] = chosen, x = place(start[pass]);
        context.lineWidth = 2;
        context.strokeRect(x, stage * rowHeight + 1, Math.max(3, place(end(pass)) - x), rowHeight - 3);
      }
    }

    const place = (time) => left + ((time - from) / (to - from)) * (width - left);
    const timeAt = (x) => from + ((x - left) / (width - left)) * (to - from);

    function labels() {
      context.textAlign = "right";
      context.textBaseline = "middle";
      const every = Math.ceil(13 / rowHeight);
      for (let stage = 0; stage < stages; stage += every) context.fillText(stage, left - 6, (stage + 0.5) * rowHeight);
      if (rowHeight < 13) return;
      context.textAlign = "center";
      const ink = context.fillStyle;
      for (let stage = 0; stage < stages; stage++) {
        const stop = firsts[stage] + counts[stage];
        for (let pass = passAt(stage, from); pass < stop && start[pass] < to; pass++) {
          const a = Math.max(left, place(start[pass])), b = Math.min(width, place(end(pass)));
          if (end(pass) - start[pass] < (18 / (width - left)) * (to - from)) continue;
          if (b - a < 18) continue;
          context.fillStyle = kinds[kindOf[pass]].letter === "F" && !isDark() ? "#fff" : "#10141a";
          context.fillText(microbatch[pass], (a + b) / 2, (stage + 0.5) * rowHeight);
        }
      }
      context.fillStyle = ink;
    }

    function axis(height) {
      context.textBaseline = "alphabetic";
      const rough = (to - from) / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
      for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
        const x = place(tick);
        context.textAlign = x > width - 30 ? "right" : "center";
        context.fillText(round(Math.abs(tick) < step / 2 ? 0 : tick), x, height - 5);
      }
    }

    function say(stage, pass) {
      const kind = kinds[kindOf[pass]], parts = kind.parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
      const chunk = data.timeline.interleave > 1 ? `, chunk ${kind.chunk}` : "";
      $("reading").textContent = `Stage ${stage}, ${kind.name}, microbatch ${microbatch[pass]}${chunk}: ` +
        `${seconds(start[pass])} to ${seconds(end(pass))}, ${seconds(kind.seconds)} (${parts})`;
    }

    function choose(stage, pass) {
      chosen = [stage, pass];
      say(stage, pass);
      draw();
    }

    function show(stage, time) {
      if (!start || stage < 0 || stage >= stages) return;
      const pass = passAt(stage, time);
      if (pass < firsts[stage] + counts[stage] && start[pass] <= time) return choose(stage, pass);
      const [part] = tailAt(stage, time);
      chosen = null;
      $("reading").textContent = part ? `Stage ${stage}, after the last pass: ${part[0]} ${seconds(part[1])}` : `Stage ${stage} waits`;
      draw();
    }

    function zoom(factor, middle = (from + to) / 2) {
      const span = Math.min(whole, Math.max(whole * 1e-6, (to - from) * factor)), share = (middle - from) / (to - from);
      move(middle - share * span - from, span);
    }

    function move(by, span = to - from) {
      from = Math.min(Math.max(0, from + by), whole - span);
      to = from + span;
      draw();
    }

    function step(key) {
      if (!start || !total) return;
      if (!chosen) return choose(0, firsts[0]);
      let [stage, pass] = chosen;
      if (key === "ArrowRight") pass = Math.min(pass + 1, firsts[stage] + counts[stage] - 1);
      if (key === "ArrowLeft") pass = Math.max(pass - 1, firsts[stage]);
      if (key === "ArrowUp" || key === "ArrowDown") {
        const time = (start[pass] + end(pass)) / 2;
        stage = Math.min(stages - 1, Math.max(0, stage + (key === "ArrowDown" ? 1 : -1)));
        pass = Math.min(passAt(stage, time), firsts[stage] + counts[stage] - 1);
      }
      if (end(pass) > to) move(end(pass) - to);
      if (start[pass] < from) move(start[pass] - from);
      choose(stage, pass);
    }

    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        move(timeAt(held) - timeAt(event.offsetX));
        held = event.offsetX;
      } else {
        show(Math.floor(event.offsetY / rowHeight), timeAt(event.offsetX));
      }
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.key.startsWith("Arrow")) step(event.key);
      else if (event.key === "+" || event.key === "=") zoom(0.5, chosen ? start[chosen[1]] : undefined);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0") zoom(Infinity);
      else return;
      event.preventDefault();
    });
    $("zoom-in").addEventListener("click", () => zoom(0.5));
    $("zoom-out").addEventListener("click", () => zoom(2));
    $("zoom-all").addEventListener("click", () => zoom(Infinity));
    new ResizeObserver(draw).observe(canvas);

    const used = new Set(kinds.map((kind) => kind.letter));
    async function begin() {
      if (data.timeline.num_passes > total) {
        $("reading").textContent = `${data.timeline.num_passes} passes are too many to draw; the table has the stages.`;
      } else {
        await unpack();
        const letters = { forward: "F", backward: "B", input: "I", weight: "W" }, found = new Set();
        for (const kind of kindOf) found.add(kinds[kind].letter);
        for (const item of $("colors").children) {
          const letter = letters[item.dataset.key];
          item.hidden = letter !== undefined && used.has(letter) && !found.has(letter);
        }
      }
      recolor();
      root.dataset.ready = "yes";
    }
    begin().catch(() => { $("reading").textContent = "This browser cannot unpack the timeline; the table has the stages."; });
    return { recolor };
  })();

  // --- hosts and groups -----------------------------------------------------------------------------------------
  (() => {
    const { axes, pools } = data.topology;
    const words = { pp: "pipeline", dp: "data", cp: "context", tp: "tensor" }, letters = { pp: "s", dp: "d", cp: "c", tp: "t" };
    const numHosts = pools.reduce((sum, pool) => sum + pool.hosts, 0);
    const size = Math.max(...pools.map((pool) => pool.devices_per_host)), perPage = Math.max(1, Math.min(12, Math.floor(96 / size)));
    let first = 0, chosen = 0;
    const place = (rank, axis) => Math.floor(rank / axis.stride) % axis.degree;
    const poolOf = (rank) => pools.find((pool) => rank < pool.first + pool.num_ranks);
    const inGroup = (one, other, axis) => axes.every((each) => each === axis || place(one, each) === place(other, each));

    function hostAt(number) {
      for (const pool of pools) {
        if (number < pool.hosts) return { pool, before: number * pool.devices_per_host };
        number -= pool.hosts;
      }
    }

    function cell(pool, device) {
      const button = document.createElement("button"), name = document.createElement("b");
      button.type = "button";
      button.className = "gpu";
      const rank = pool.first + device, works = device < pool.num_ranks;
      name.textContent = works ? rank : "idle";
      button.append(name);
      if (works) {
        button.dataset.rank = rank;
        button.append(axes.filter((axis) => axis.degree > 1).map((axis) => letters[axis.name] + place(rank, axis)).join(" "));
      } else {
        button.disabled = true;
      }
      return button;
    }

    function show() {
      const hosts = [];
      for (let host = first; host < Math.min(numHosts, first + perPage); host++) {
        const box = document.createElement("div"), title = document.createElement("h3"), cells = document.createElement("div");
        box.className = "host";
        const { pool, before } = hostAt(host);
        const works = before < pool.num_ranks && pool.domain, own = before / pool.devices_per_host;
        const domain = works ? `${pool.domain.name} ${Math.floor(own / pool.domain.hosts)}` : "";
        title.textContent = [`host ${host}`, pool.name, domain].filter(Boolean).join(", ");
        for (let i = 0; i < pool.devices_per_host; i++) cells.append(cell(pool, before + i));
        box.append(title, cells);
        hosts.push(box);
      }
      $("hosts").replaceChildren(...hosts);
      $("hosts-shown").textContent = `hosts ${first} to ${Math.min(numHosts, first + perPage) - 1} of ${numHosts}`;
      $("hosts-before").disabled = first === 0;
      $("hosts-next").disabled = first + perPage >= numHosts;
      mark();
    }

    function mark() {
      for (const button of $("hosts").querySelectorAll("[data-rank]")) {
        const rank = Number(button.dataset.rank), groups = rank === chosen ? ["self"] : [];
        for (const axis of axes) if (rank !== chosen && axis.degree > 1 && inGroup(rank, chosen, axis)) groups.push(axis.name);
        button.dataset.group = groups.join(" ");
        button.setAttribute("aria-pressed", rank === chosen);
      }
      const lines = axes.filter((axis) => axis.degree > 1).reverse().map((axis) => {
        const base = chosen - place(chosen, axis) * axis.stride;
        const ranks = Array.from({ length: Math.min(axis.degree, 9) }, (_, i) => base + i * axis.stride);
        const more = axis.degree > 9 ? `, ... ${base + (axis.degree - 1) * axis.stride}` : "";
        return `${words[axis.name]} parallel: ${axis.degree} ranks ${ranks.join(", ")}${more} over ${poolOf(chosen).links[axis.name].join(" and ") || "one device"}`;
      });
      $("groups").textContent = `Rank ${chosen}. ${lines.join(". ") || "It has no group."}`;
    }

    $("hosts").addEventListener("click", (event) => {
      const button = event.target.closest("[data-rank]");
      if (button) { chosen = Number(button.dataset.rank); mark(); }
    });
    $("hosts-before").addEventListener("click", () => { first = Math.max(0, first - perPage); show(); });
    $("hosts-next").addEventListener("click", () => { first += perPage; show(); });
    show();
  })();
})();
