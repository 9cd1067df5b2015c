//! What a stage and a hop cost: the only place that knows times, bytes and links. Per batch, in seconds and bytes.

use super::problem::{Chain, Hop, HostType, Objective};
use super::{ChainHop, ChainPlan, ChainStage};
use crate::control::Control;
use crate::planner::effort::chain as effort;

/// Hosts that may take one stage together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostSet {
    /// Index into [`Chain::types`].
    pub(super) kind: usize,
    /// Hosts of that type.
    pub(super) replicas: usize,
}

/// A stage of a path: `crew` takes layers `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) crew: usize,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Sums that make every stage and hop a matter of a subtraction and a division.
pub(super) struct Costs<'a> {
    pub(super) chain: &'a Chain,
    /// The last position: all layers are before it.
    pub(super) last: usize,
    pub(super) crews: Vec<HostSet>,
    /// Ends of stages that begin at each position, if positions are not in a row.
    later: Vec<Vec<u32>>,
    /// Seconds of all layers before a position, by type.
    time_s: Vec<Vec<f64>>,
    /// Layers before a position that may not run, by type.
    barred: Vec<Vec<u32>>,
    /// Bytes of all layers before a position.
    held: Vec<i128>,
    /// Bytes that a stage needs to receive at a position, and to send from it.
    received: Vec<i128>,
    sent: Vec<i128>,
    pub(super) memory: Vec<i128>,
    /// Types whose memory no stage can fill.
    roomy: Vec<bool>,
    /// The longest that full-width data may take over a position, between any two types.
    pub(super) slowest_s: Vec<f64>,
    /// No stage needs more memory by starting here instead of further left.
    pub(super) light: Vec<bool>,
}

/// Memory is compared strictly, so its sums must not round: 1/1024 bytes, as integers.
pub(super) fn exact(bytes: f64) -> i128 {
    #[allow(clippy::cast_possible_truncation, reason = "saturates at infinity, which no sum reaches")]
    let units = (bytes * 1024.0).min(1e37).round() as i128;
    units
}

/// For each position those that hold all its layers and more; None if they are too many, or `control` stopped it.
fn later(chain: &Chain, control: &Control) -> Option<Vec<Vec<u32>>> {
    let words = chain.layer_bytes.len().div_ceil(64);
    let mut sets = vec![0_u64; words * chain.inside.len()];
    for (set, inside) in sets.chunks_mut(words).zip(&chain.inside) {
        for &layer in inside {
            set[layer / 64] |= 1 << (layer % 64);
        }
    }
    let sets: Vec<&[u64]> = sets.chunks(words).collect();
    let mut pairs = 0;
    let mut rows = Vec::with_capacity(sets.len());
    for (first, inner) in sets.iter().enumerate() {
        let is_later = |&end: &usize| inner.iter().zip(sets[end]).all(|(inner, outer)| inner & !outer == 0);
        let row: Vec<u32> = (first + 1..sets.len()).filter(is_later).map(|end| end as u32).collect();
        pairs += row.len();
        if pairs > effort::MAX_PAIRS || (first % 128 == 0 && control.should_stop()) {
            return None;
        }
        rows.push(row);
    }
    Some(rows)
}

/// Sums over the layers before each position.
fn sums<T: Copy + std::ops::Add<Output = T>>(chain: &Chain, zero: T, of_layer: impl Fn(usize) -> T) -> Vec<T> {
    if chain.inside.is_empty() {
        let mut sum = zero;
        let layers = 0..chain.layer_bytes.len();
        return std::iter::once(zero)
            .chain(layers.map(|layer| {
                sum = sum + of_layer(layer);
                sum
            }))
            .collect();
    }
    let before = |inside: &Vec<usize>| inside.iter().fold(zero, |sum, &layer| sum + of_layer(layer));
    chain.inside.iter().map(before).collect()
}

impl<'a> Costs<'a> {
    /// `None` if the stages are too many to look at, or `control` stopped it.
    pub(super) fn new(chain: &'a Chain, control: &Control) -> Option<Self> {
        let later = if chain.is_row() { Vec::new() } else { later(chain, control)? };
        Some(Self { later, ..Self::without_stages(chain) })
    }

    /// What there is to know without looking at stages; none are found where positions are not in a row.
    pub(super) fn without_stages(chain: &'a Chain) -> Self {
        let last = chain.cut_bytes.len() - 1;
        let crews = chain
            .types
            .iter()
            .enumerate()
            .flat_map(|(kind, host)| {
                (1..=chain.max_replicas.min(host.hosts)).map(move |replicas| HostSet { kind, replicas })
            })
            .collect();
        let barred = chain
            .types
            .iter()
            .map(|host| sums(chain, 0, |layer| u32::from(!host.may_run.is_empty() && !host.may_run[layer])))
            .collect();
        let held = sums(chain, 0, |layer| exact(chain.layer_bytes[layer]));
        // Where the data comes from, nobody has to be waited for: only stages behind the first have batches waiting.
        let buffered = |position: usize| if position > 0 { chain.buffers_in } else { 0 };
        let received: Vec<i128> = (0..=last)
            .map(|position| exact(chain.cut_bytes[position]) * (1 + i128::from(buffered(position))))
            .collect();
        let sent: Vec<i128> =
            chain.cut_bytes.iter().map(|&bytes| exact(bytes) * (1 + i128::from(chain.buffers_out))).collect();
        let memory: Vec<i128> = chain.types.iter().map(|host| exact(host.memory_bytes)).collect();
        let most = held[last] + received.iter().max().unwrap_or(&0) + sent.iter().max().unwrap_or(&0);
        let roomy: Vec<bool> = memory.iter().map(|&memory| memory > most).collect();
        let mut least = i128::MAX;
        let light = (0..=last)
            .map(|position| {
                let start = received[position] - held[position];
                let light = start <= least || position == last || roomy.iter().all(|&roomy| roomy);
                least = least.min(start);
                light
            })
            .collect();
        let mut costs = Self {
            chain,
            last,
            crews,
            later: Vec::new(),
            time_s: chain.types.iter().map(|host| sums(chain, 0.0, |layer| host.time_s[layer])).collect(),
            barred,
            held,
            received,
            sent,
            memory,
            roomy,
            slowest_s: Vec::new(),
            light,
        };
        costs.slowest_s = (0..=last).map(|position| costs.slowest_hop_s(position)).collect();
        costs
    }

    /// Whether any two positions bound a stage.
    pub(super) fn is_row(&self) -> bool {
        self.chain.is_row()
    }

    /// Ends of stages from `first`, if positions are not in a row.
    pub(super) fn later(&self, first: usize) -> &[u32] {
        self.later.get(first).map_or(&[], Vec::as_slice)
    }

    /// The least that a stage with each layer needs of memory, whatever else it holds; where the model can be cut
    /// elsewhere, too, what the layer occupies.
    pub(super) fn least_needs(&self) -> Vec<i128> {
        let chain = self.chain;
        if chain.is_restricted {
            return chain.layer_bytes.iter().map(|&bytes| exact(bytes)).collect();
        }
        let start = |position: usize| self.received[position] - self.held[position];
        let end = |position: usize| self.held[position] + self.sent[position];
        let layers = chain.layer_bytes.len();
        if chain.inside.is_empty() {
            let mut ends: Vec<i128> = (0..=layers).map(end).collect();
            for position in (0..layers).rev() {
                ends[position] = ends[position].min(ends[position + 1]);
            }
            let mut least = i128::MAX;
            let need = |layer| {
                least = least.min(start(layer));
                least + ends[layer + 1]
            };
            return (0..layers).map(need).collect();
        }
        let (mut starts, mut ends) = (vec![start(0); layers], vec![end(self.last); layers]);
        for (position, inside) in chain.inside.iter().enumerate() {
            let mut inside = inside.iter().copied().peekable();
            for layer in 0..layers {
                if inside.next_if_eq(&layer).is_some() {
                    ends[layer] = ends[layer].min(end(position));
                } else {
                    starts[layer] = starts[layer].min(start(position));
                }
            }
        }
        starts.iter().zip(&ends).map(|(start, end)| start + end).collect()
    }

    /// The least that any stage needs for the batches that it receives and sends, with other cuts nothing.
    pub(super) fn min_buffers(&self) -> i128 {
        let least = |of: &[i128]| of.iter().min().copied().unwrap_or(0);
        if self.chain.is_restricted { 0 } else { least(&self.received[..self.last]) + least(&self.sent[1..]) }
    }

    /// What all layers occupy.
    pub(super) fn all_held(&self) -> i128 {
        self.held[self.last]
    }

    /// What all hosts have together for layers, if so much of each is for something else.
    pub(super) fn all_memory(&self, beside: i128) -> i128 {
        let of_type = |(host, &memory): (&HostType, &i128)| (memory - beside).max(0).saturating_mul(host.hosts as i128);
        self.chain.types.iter().zip(&self.memory).map(of_type).fold(0, i128::saturating_add)
    }

    fn slowest_hop_s(&self, position: usize) -> f64 {
        let used = |kind: &usize| self.chain.types[*kind].hosts > 0;
        let kinds = || (0..self.chain.types.len()).filter(used);
        let bytes = self.chain.cut_bytes[position];
        let mut slowest = 0.0_f64;
        for from in kinds() {
            if position == self.last {
                slowest = slowest.max(self.chain.output.get(from).map_or(0.0, |hop| hop.seconds(bytes)));
                continue;
            }
            for to in kinds().filter(|&to| to != from || self.chain.types[to].hosts > 1) {
                slowest = slowest.max(self.chain.links[from][to].seconds(bytes));
            }
        }
        slowest
    }

    /// Seconds that one host of the crew computes on a batch.
    pub(super) fn compute_s(&self, crew: usize, first: usize, end: usize) -> f64 {
        let time_s = &self.time_s[self.crews[crew].kind];
        time_s[end] - time_s[first]
    }

    /// Seconds between batches that the stage keeps up.
    pub(super) fn interval_s(&self, crew: usize, first: usize, end: usize) -> f64 {
        self.compute_s(crew, first, end) / self.crews[crew].replicas as f64
    }

    /// Whether each of these layers may run on the crew.
    pub(super) fn may_run(&self, crew: usize, first: usize, end: usize) -> bool {
        let barred = &self.barred[self.crews[crew].kind];
        barred[end] == barred[first]
    }

    /// The last end that a stage from `first` can have without its layers and input alone filling the memory.
    pub(super) fn furthest_by_memory(&self, crew: usize, first: usize) -> usize {
        let kind = self.crews[crew].kind;
        if self.roomy[kind] {
            return self.last;
        }
        let room = self.memory[kind] - self.received[first] + self.held[first];
        self.held.partition_point(|&held| held < room).saturating_sub(1)
    }

    /// Whether the stage fits into the memory of the crew's hosts.
    pub(super) fn fits(&self, crew: usize, first: usize, end: usize) -> bool {
        let kind = self.crews[crew].kind;
        self.roomy[kind] || self.memory[kind] > self.need(first, end)
    }

    fn need(&self, first: usize, end: usize) -> i128 {
        self.held[end] - self.held[first] + self.received[first] + self.sent[end]
    }

    /// Bytes that the stage needs on each host.
    pub(super) fn memory_bytes(&self, first: usize, end: usize) -> f64 {
        self.need(first, end) as f64 / 1024.0
    }

    fn link(&self, from: Option<usize>, to: Option<usize>) -> Hop {
        let kind = |crew: usize| self.crews[crew].kind;
        match (from, to) {
            (Some(from), Some(to)) => self.chain.links[kind(from)][kind(to)],
            (None, Some(to)) => *self.chain.input.get(kind(to)).unwrap_or(&Hop::FREE),
            (Some(from), None) => *self.chain.output.get(kind(from)).unwrap_or(&Hop::FREE),
            (None, None) => Hop::FREE,
        }
    }

    fn bytes(&self, position: usize, bits: u32) -> f64 {
        self.chain.cut_bytes[position] * f64::from(bits) / f64::from(self.chain.bits[0])
    }

    /// Seconds that a batch is under way from one crew to the next; `None` is the world outside.
    pub(super) fn hop_s(&self, position: usize, from: Option<usize>, to: Option<usize>, bits: u32) -> f64 {
        self.link(from, to).seconds(self.bytes(position, bits))
    }

    /// Batches that are under way at once: each replica has its own port and takes its turn.
    fn lanes(&self, from: Option<usize>, to: Option<usize>) -> f64 {
        let replicas = |crew: Option<usize>| crew.map_or(usize::MAX, |crew| self.crews[crew].replicas);
        replicas(from).min(replicas(to)) as f64
    }

    /// Most bits that let the hop keep up with `limit_s`; `None` where even the fewest are too many.
    pub(super) fn bits_within(
        &self,
        position: usize,
        from: Option<usize>,
        to: Option<usize>,
        limit_s: f64,
    ) -> Option<u32> {
        let lanes = self.lanes(from, to);
        // What enters and leaves the pipeline keeps its bits: only edges between hosts are quantised.
        let widths = if from.is_some() && to.is_some() { &self.chain.bits[..] } else { &self.chain.bits[..1] };
        widths.iter().copied().find(|&bits| self.hop_s(position, from, to, bits) / lanes <= limit_s)
    }

    /// The plan that a path stands for.
    pub(super) fn describe(
        &self,
        path: &[Step],
        objective: Objective,
        limit_s: f64,
        value: f64,
        lower_bound: f64,
        looked_at: u64,
    ) -> ChainPlan {
        let full = self.chain.bits[0];
        let stages: Vec<ChainStage> = path
            .iter()
            .map(|&Step { crew, first, end }| ChainStage {
                host_type: self.crews[crew].kind,
                replicas: self.crews[crew].replicas,
                first,
                end,
                compute_s: self.compute_s(crew, first, end),
                interval_s: self.interval_s(crew, first, end),
                memory_bytes: self.memory_bytes(first, end),
            })
            .collect();
        let hops: Vec<ChainHop> = (0..=path.len())
            .map(|index| {
                let from = index.checked_sub(1).map(|before| path[before].crew);
                let to = path.get(index).map(|step| step.crew);
                let position = path.get(index).map_or(self.last, |step| step.first);
                let bits = match objective {
                    Objective::Bits => self.bits_within(position, from, to, limit_s).unwrap_or(full),
                    _ => full,
                };
                let seconds = self.hop_s(position, from, to, bits);
                let interval_s = seconds / self.lanes(from, to);
                ChainHop { bits, bytes: self.bytes(position, bits), seconds, interval_s }
            })
            .collect();
        let interval_s = self.bottleneck_s(path, limit_s);
        let latency_s =
            stages.iter().map(|stage| stage.compute_s).sum::<f64>() + hops.iter().map(|hop| hop.seconds).sum::<f64>();
        ChainPlan {
            stages,
            hops,
            interval_s,
            latency_s,
            value,
            lower_bound,
            searched_bound: lower_bound,
            has_all_positions: true,
            looked_at,
        }
    }

    /// Largest interval of a path's stages and hops, with the bits that `limit_s` leaves.
    pub(super) fn bottleneck_s(&self, path: &[Step], limit_s: f64) -> f64 {
        let mut largest = 0.0_f64;
        let mut from = None;
        for &Step { crew, first, end } in path {
            largest = largest
                .max(self.hop_interval_s(first, from, Some(crew), limit_s))
                .max(self.interval_s(crew, first, end));
            from = Some(crew);
        }
        largest.max(self.hop_interval_s(self.last, from, None, limit_s))
    }

    fn hop_interval_s(&self, position: usize, from: Option<usize>, to: Option<usize>, limit_s: f64) -> f64 {
        let bits = self.bits_within(position, from, to, limit_s).unwrap_or(self.chain.bits[0]);
        self.hop_s(position, from, to, bits) / self.lanes(from, to)
    }
}
