//! Costs of a stage and of a hop, per batch, in seconds and bytes. No other module reads times, sizes and links.

use super::problem::{Chain, Hop, HostType, Objective};
use super::{ChainHop, ChainPlan, ChainStage};
use crate::control::Control;
use crate::planner::effort::chain as effort;

/// Hosts of one type that may share a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostSet {
    /// Index of the host type in [`Chain::types`].
    pub(super) kind: usize,
    /// Number of hosts of that type.
    pub(super) replicas: usize,
}

/// A stage of a path: host set `host_set` takes the layers between positions `first` and `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) host_set: usize,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Prefix sums, with which the cost of every stage and hop takes a subtraction and a division.
pub(super) struct Costs<'a> {
    pub(super) chain: &'a Chain,
    /// The last position, before which all layers are.
    pub(super) last: usize,
    pub(super) host_sets: Vec<HostSet>,
    /// Ends of stages that begin at each position. Empty if positions are all nested.
    later: Vec<Vec<u32>>,
    /// Seconds of all layers before a position, by type.
    time_s: Vec<Vec<f64>>,
    /// Number of layers before a position that may not run, by type.
    barred: Vec<Vec<u32>>,
    /// Bytes of all layers before a position, in units of 1/1024 byte.
    held: Vec<i128>,
    /// Bytes that a stage needs for its input at a position, buffers included, in the same units.
    received: Vec<i128>,
    /// Bytes that a stage needs for its output at a position, buffers included, in the same units.
    sent: Vec<i128>,
    pub(super) memory: Vec<i128>,
    /// Whether the memory of a type exceeds the need of every stage.
    never_full: Vec<bool>,
    /// The longest time that unquantized data may take over a position, between any two types.
    pub(super) slowest_s: Vec<f64>,
    /// Whether no stage needs more memory if it starts at a position instead of an earlier one.
    pub(super) light: Vec<bool>,
}

/// Converts bytes to integers in units of 1/1024 byte. Memory is compared strictly, so its sums must not round.
pub(super) fn exact(bytes: f64) -> i128 {
    #[allow(clippy::cast_possible_truncation, reason = "saturates at infinity, which no sum reaches")]
    let units = (bytes * 1024.0).min(1e37).round() as i128;
    units
}

/// Lists for each position the positions that contain all its layers and more. `None` if there are too many pairs, or
/// if `control` has stopped.
fn later(chain: &Chain, control: &Control) -> Option<Vec<Vec<u32>>> {
    // Bit sets make a subset test a few instructions per 64 layers. All pairs are tested, so this is the inner loop.
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

/// Sums a property of the layers before each position.
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
    /// Computes all sums. `None` if there are too many stages to list, or if `control` has stopped.
    pub(super) fn new(chain: &'a Chain, control: &Control) -> Option<Self> {
        let later = if chain.is_row() { Vec::new() } else { later(chain, control)? };
        Some(Self { later, ..Self::without_stages(chain) })
    }

    /// Computes all sums except the list of stages. Without it, searches find no stages if positions are not all
    /// nested.
    pub(super) fn without_stages(chain: &'a Chain) -> Self {
        let last = chain.cut_bytes.len() - 1;
        let host_sets = chain
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
        // As in PipeEdge, batches for the first stage wait at the source of the data, so only later stages buffer
        // input.
        let buffered = |position: usize| if position > 0 { chain.buffers_in } else { 0 };
        let received: Vec<i128> = (0..=last)
            .map(|position| exact(chain.cut_bytes[position]) * (1 + i128::from(buffered(position))))
            .collect();
        let sent: Vec<i128> =
            chain.cut_bytes.iter().map(|&bytes| exact(bytes) * (1 + i128::from(chain.buffers_out))).collect();
        let memory: Vec<i128> = chain.types.iter().map(|host| exact(host.memory_bytes)).collect();
        let max = held[last] + received.iter().max().unwrap_or(&0) + sent.iter().max().unwrap_or(&0);
        let never_full: Vec<bool> = memory.iter().map(|&memory| memory > max).collect();
        // A position is light if its input minus the layers before it is at most that of every earlier position. Then a
        // stage that starts here needs no more memory than one that starts earlier.
        let mut min = i128::MAX;
        let light = (0..=last)
            .map(|position| {
                let start = received[position] - held[position];
                let light = start <= min || position == last || never_full.iter().all(|&never_full| never_full);
                min = min.min(start);
                light
            })
            .collect();
        let mut costs = Self {
            chain,
            last,
            host_sets,
            later: Vec::new(),
            time_s: chain.types.iter().map(|host| sums(chain, 0.0, |layer| host.time_s[layer])).collect(),
            barred,
            held,
            received,
            sent,
            memory,
            never_full,
            slowest_s: Vec::new(),
            light,
        };
        costs.slowest_s = (0..=last).map(|position| costs.slowest_hop_s(position)).collect();
        costs
    }

    /// Returns whether all positions are nested, so that any two of them bound a stage.
    pub(super) fn is_row(&self) -> bool {
        self.chain.is_row()
    }

    /// Returns the ends of stages from `first`. Empty if positions are all nested.
    pub(super) fn later(&self, first: usize) -> &[u32] {
        self.later.get(first).map_or(&[], Vec::as_slice)
    }

    /// Returns for each layer the memory that any stage with it needs at least. If the model has other cuts, that is
    /// only the size of the layer.
    pub(super) fn min_needs(&self) -> Vec<i128> {
        let chain = self.chain;
        // Other cuts may have narrower boundaries, so buffers prove nothing then.
        if chain.is_restricted {
            return chain.layer_bytes.iter().map(|&bytes| exact(bytes)).collect();
        }
        let start = |position: usize| self.received[position] - self.held[position];
        let end = |position: usize| self.held[position] + self.sent[position];
        let layers = chain.layer_bytes.len();
        if chain.inside.is_empty() {
            let mut ends: Vec<i128> = (0..=layers).map(end).collect();
            // Suffix minima of the ends and prefix minima of the starts make this linear in the layers.
            for position in (0..layers).rev() {
                ends[position] = ends[position].min(ends[position + 1]);
            }
            let mut min = i128::MAX;
            let need = |layer| {
                min = min.min(start(layer));
                min + ends[layer + 1]
            };
            return (0..layers).map(need).collect();
        }
        // In a branching model, a stage with a layer begins at a position without it and ends at one with it. The two
        // minima are independent, so their sum is a lower bound.
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

    /// Returns the memory that any stage needs at least for the batches that it receives and sends. 0 if the model has
    /// other cuts.
    pub(super) fn min_buffers(&self) -> i128 {
        let min = |of: &[i128]| of.iter().min().copied().unwrap_or(0);
        if self.chain.is_restricted { 0 } else { min(&self.received[..self.last]) + min(&self.sent[1..]) }
    }

    /// Returns the size of all layers together.
    pub(super) fn all_held(&self) -> i128 {
        self.held[self.last]
    }

    /// Returns the memory of all hosts together, if `beside` of each is used for something else.
    pub(super) fn all_memory(&self, beside: i128) -> i128 {
        let of_type = |(host, &memory): (&HostType, &i128)| (memory - beside).max(0).saturating_mul(host.hosts as i128);
        self.chain.types.iter().zip(&self.memory).map(of_type).fold(0, i128::saturating_add)
    }

    /// Returns the longest time that a hop over `position` can take.
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
            // A hop between two hosts of one type needs a second host.
            for to in kinds().filter(|&to| to != from || self.chain.types[to].hosts > 1) {
                slowest = slowest.max(self.chain.links[from][to].seconds(bytes));
            }
        }
        slowest
    }

    /// Returns the seconds that one host of the set computes for one batch.
    pub(super) fn compute_s(&self, host_set: usize, first: usize, end: usize) -> f64 {
        let time_s = &self.time_s[self.host_sets[host_set].kind];
        time_s[end] - time_s[first]
    }

    /// Returns the seconds between batches that the stage can sustain.
    pub(super) fn interval_s(&self, host_set: usize, first: usize, end: usize) -> f64 {
        self.compute_s(host_set, first, end) / self.host_sets[host_set].replicas as f64
    }

    /// Returns whether each of these layers may run on the host set.
    pub(super) fn may_run(&self, host_set: usize, first: usize, end: usize) -> bool {
        let barred = &self.barred[self.host_sets[host_set].kind];
        barred[end] == barred[first]
    }

    /// Returns the last end of a stage from `first` whose layers and input alone do not fill the memory.
    pub(super) fn furthest_by_memory(&self, host_set: usize, first: usize) -> usize {
        let kind = self.host_sets[host_set].kind;
        if self.never_full[kind] {
            return self.last;
        }
        let room = self.memory[kind] - self.received[first] + self.held[first];
        // Sums of sizes ascend with the position, so the last fitting end is found by bisection.
        self.held.partition_point(|&held| held < room).saturating_sub(1)
    }

    /// Returns whether the stage fits in the memory of its hosts.
    pub(super) fn fits(&self, host_set: usize, first: usize, end: usize) -> bool {
        let kind = self.host_sets[host_set].kind;
        self.never_full[kind] || self.memory[kind] > self.need(first, end)
    }

    /// Returns the memory that the stage needs on each host, in units of 1/1024 byte.
    fn need(&self, first: usize, end: usize) -> i128 {
        self.held[end] - self.held[first] + self.received[first] + self.sent[end]
    }

    /// Returns the bytes that the stage needs on each host.
    pub(super) fn memory_bytes(&self, first: usize, end: usize) -> f64 {
        self.need(first, end) as f64 / 1024.0
    }

    /// Returns the link between two host sets. `None` stands for the source or the destination of the data.
    fn link(&self, from: Option<usize>, to: Option<usize>) -> Hop {
        let kind = |host_set: usize| self.host_sets[host_set].kind;
        match (from, to) {
            (Some(from), Some(to)) => self.chain.links[kind(from)][kind(to)],
            (None, Some(to)) => *self.chain.input.get(kind(to)).unwrap_or(&Hop::FREE),
            (Some(from), None) => *self.chain.output.get(kind(from)).unwrap_or(&Hop::FREE),
            (None, None) => Hop::FREE,
        }
    }

    /// Returns the bytes of one batch that cross `position` with `bits` per value.
    fn bytes(&self, position: usize, bits: u32) -> f64 {
        // Positions store the bytes at full width, the first of the allowed widths.
        self.chain.cut_bytes[position] * f64::from(bits) / f64::from(self.chain.bits[0])
    }

    /// Returns the seconds that a batch travels from one host set to the next. `None` stands for the world outside.
    pub(super) fn hop_s(&self, position: usize, from: Option<usize>, to: Option<usize>, bits: u32) -> f64 {
        self.link(from, to).seconds(self.bytes(position, bits))
    }

    /// Returns how many batches travel at once: each replica has its own port, and the replicas take turns.
    fn lanes(&self, from: Option<usize>, to: Option<usize>) -> f64 {
        let replicas =
            |host_set: Option<usize>| host_set.map_or(usize::MAX, |host_set| self.host_sets[host_set].replicas);
        // The outside world never limits the hop: it counts as infinitely many replicas.
        replicas(from).min(replicas(to)) as f64
    }

    /// Returns the largest number of bits with which the hop keeps `limit_s`, or `None` if even the smallest is too
    /// large.
    pub(super) fn bits_within(
        &self,
        position: usize,
        from: Option<usize>,
        to: Option<usize>,
        limit_s: f64,
    ) -> Option<u32> {
        let lanes = self.lanes(from, to);
        // Input and result of the pipeline keep their width. Only edges between hosts are quantized.
        let widths = if from.is_some() && to.is_some() { &self.chain.bits[..] } else { &self.chain.bits[..1] };
        widths.iter().copied().find(|&bits| self.hop_s(position, from, to, bits) / lanes <= limit_s)
    }

    /// Builds the plan that a path stands for.
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
            .map(|&Step { host_set, first, end }| ChainStage {
                host_type: self.host_sets[host_set].kind,
                replicas: self.host_sets[host_set].replicas,
                first,
                end,
                compute_s: self.compute_s(host_set, first, end),
                interval_s: self.interval_s(host_set, first, end),
                memory_bytes: self.memory_bytes(first, end),
            })
            .collect();
        let hops: Vec<ChainHop> = (0..=path.len())
            .map(|index| {
                let from = index.checked_sub(1).map(|before| path[before].host_set);
                let to = path.get(index).map(|step| step.host_set);
                let position = path.get(index).map_or(self.last, |step| step.first);
                // Only the objective `bits` gives up precision. All others keep the full width even where fewer bits
                // would be faster.
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

    /// Returns the largest interval of a path's stages and hops, with the bits that `limit_s` allows.
    pub(super) fn bottleneck_s(&self, path: &[Step], limit_s: f64) -> f64 {
        let mut largest = 0.0_f64;
        let mut from = None;
        for &Step { host_set, first, end } in path {
            largest = largest
                .max(self.hop_interval_s(first, from, Some(host_set), limit_s))
                .max(self.interval_s(host_set, first, end));
            from = Some(host_set);
        }
        largest.max(self.hop_interval_s(self.last, from, None, limit_s))
    }

    /// Returns the seconds between batches that a hop can sustain, with the bits that `limit_s` allows.
    fn hop_interval_s(&self, position: usize, from: Option<usize>, to: Option<usize>, limit_s: f64) -> f64 {
        let bits = self.bits_within(position, from, to, limit_s).unwrap_or(self.chain.bits[0]);
        self.hop_s(position, from, to, bits) / self.lanes(from, to)
    }
}
