// Data of the page: unpacks columns into typed arrays, and precomputes shares of time for zoomed-out frames.

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function column(id, Type) {
  const element = byId(id);
  if (!element) return new Type(0);
  const packed = new Blob([bytesOf(element.textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  element.remove();
  const planes = new Uint8Array(await new Response(packed).arrayBuffer()), count = planes.length / 4;
  const column = new Type(count);
  for (let i = 0, sum = 0; i < count; i++) {
    const folded = planes[i] | planes[count + i] << 8 | planes[2 * count + i] << 16 | planes[3 * count + i] << 24;
    column[i] = sum = sum + ((folded >>> 1) ^ -(folded & 1)) | 0;
  }
  return column;
}

async function open() {
  for (const [number, meta] of META.timelines.entries()) {
    const get = (name, Type) => column(`c${number}-${name}`, Type);
    const t = { ...meta };
    byId("status").textContent = `opening ${meta.label}…`;
    t.bounds = await get("bounds", Uint32Array);
    t.kind = await get("kind", Uint8Array);
    t.stage = await get("stage", Uint32Array);
    t.batch = await get("micro_batch", Uint32Array);
    t.backwardStage = meta.fused ? await get("backward_stage", Uint32Array) : t.stage;
    t.backwardBatch = meta.fused ? await get("backward_micro_batch", Uint32Array) : t.batch;
    t.start = await get("start", Uint32Array);
    t.end = await get("duration", Uint32Array);
    for (let i = 0; i < t.end.length; i++) t.end[i] += t.start[i];
    t.slack = await get("slack", Uint32Array);
    t.virtualStageOf = await get("virtual_stage_of_stage", Uint16Array);
    t.lastVirtualStage = Math.max(1, t.virtualStageOf.reduce((maximum, one) => Math.max(maximum, one), 0));
    t.idle = { bounds: await get("idle_bounds", Uint32Array), start: await get("idle_start", Uint32Array),
      end: await get("idle_duration", Uint32Array), cause: await get("idle_cause", Uint8Array) };
    for (let i = 0; i < t.idle.end.length; i++) t.idle.end[i] += t.idle.start[i];
    t.transfer = { from: await get("transfer_from", Uint32Array), to: await get("transfer_to", Uint32Array),
      start: await get("transfer_start", Uint32Array), end: await get("transfer_duration", Uint32Array),
      kind: await get("transfer_kind", Uint8Array), batch: await get("transfer_micro_batch", Uint32Array), longest: 0 };
    for (let i = 0; i < t.transfer.end.length; i++) {
      t.transfer.longest = Math.max(t.transfer.longest, t.transfer.end[i]);
      t.transfer.end[i] += t.transfer.start[i];
    }
    t.sync = { rank: await get("sync_rank", Uint32Array), start: await get("sync_start", Uint32Array), end: await get("sync_duration", Uint32Array) };
    for (let i = 0; i < t.sync.end.length; i++) t.sync.end[i] += t.sync.start[i];
    t.memoryBounds = await get("memory_bounds", Uint32Array);
    t.memoryTime = await get("memory_time", Uint32Array);
    t.memorySize = await get("memory_size", Uint32Array);
    if (t.actions > MAX_BOXES) await overview(t);
    timelines.push(t);
  }
  state.ready = true;
  fit();
  restore(waiting);
}

// Return the share of each class in a few thousand equal columns of each rank. Zoomed-out frames read it instead of the
// actions, to be independent of their number. Classes are F, B, I, W, then the causes of idle time.
async function overview(t) {
  const columns = Math.max(64, Math.min(4096, Math.floor(OVERVIEW_CELLS / t.ranks)));
  const ticks = t.makespan_s / t.tick_s / columns || 1;
  const table = Array.from({ length: 4 + causes.length }, () => null);
  const add = (code, rank, start, end, weight) => {
    const cells = table[code] ??= new Float32Array(t.ranks * columns);
    spread(cells, rank * columns, columns, start / ticks, end / ticks, weight);
  };
  let breath = performance.now();
  for (let rank = 0; rank < t.ranks; rank++) {
    eachInterval(t, rank, 0, Infinity, (code, start, end, weight) => add(code, rank, start, end, weight));
    if (performance.now() - breath > 40) { await new Promise((resume) => setTimeout(resume)); breath = performance.now(); }
  }
  t.overview = { columns, ticks, table };
}

// Add the interval from..to, in units of cells, to cells[base ..]. A full cell counts `weight`.
function spread(cells, base, count, from, to, weight) {
  const first = Math.max(0, Math.floor(from)), last = Math.min(count - 1, Math.floor(to));
  for (let i = first; i <= last; i++) cells[base + i] += weight * Math.max(0, Math.min(to, i + 1) - Math.max(from, i));
}

function eachInterval(t, rank, t0, t1, take) {
  for (let i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0); i < t.bounds[rank + 1] && t.start[i] < t1; i++) {
    const kind = t.kind[i] & 7;
    if (kind === 4) { take(0, t.start[i], t.end[i], 0.5); take(1, t.start[i], t.end[i], 0.5); } else take(kind, t.start[i], t.end[i], 1);
  }
  const idle = t.idle;
  for (let i = firstEndingAfter(idle.end, idle.bounds[rank], idle.bounds[rank + 1], t0); i < idle.bounds[rank + 1] && idle.start[i] < t1; i++)
    take(4 + idle.cause[i], idle.start[i], idle.end[i], 1);
}

// Return the index of the first entry of ends[low .. high] greater than `time`. The entries must ascend.
function firstEndingAfter(ends, low, high, time) {
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] > time) high = middle; else low = middle + 1; }
  return low;
}
