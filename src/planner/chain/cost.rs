//! What a stage and a hop cost: the only place that knows times, bytes and links. Per batch, in seconds and bytes.

use super::question::{Chain, Hop, Objective};
use super::{ChainHop, ChainPlan, ChainStage};

/// Hosts that may take one stage together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crew {
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
    pub(super) layers: usize,
    pub(super) crews: Vec<Crew>,
    /// Seconds of all layers before a position, by type.
    time_s: Vec<Vec<f64>>,
    /// Layers before a position that may not run, by type.
    barred: Vec<Vec<u32>>,
    /// Bytes of all layers before a position.
    held: Vec<i128>,
    /// Bytes that a stage needs to receive at a position, and to send from it.
    received: Vec<i128>,
    sent: Vec<i128>,
    memory: Vec<i128>,
    /// Types whose memory no stage can fill.
    roomy: Vec<bool>,
    /// The longest that full-width data may take over a position, between any two types.
    pub(super) slowest_s: Vec<f64>,
    /// No stage needs more memory by starting here instead of further left.
    pub(super) light: Vec<bool>,
}

/// Memory is compared strictly, so its sums must not round: 1/1024 bytes, as integers.
fn exact(bytes: f64) -> i128 {
    #[allow(clippy::cast_possible_truncation, reason = "saturates at infinity, which no sum reaches")]
    let units = (bytes * 1024.0).min(1e37).round() as i128;
    units
}

fn running_sums(values: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    std::iter::once(0.0)
        .chain(values.iter().map(|value| {
            sum += value;
            sum
        }))
        .collect()
}

impl<'a> Costs<'a> {
    pub(super) fn new(chain: &'a Chain) -> Self {
        let layers = chain.layer_bytes.len();
        let crews = chain
            .types
            .iter()
            .enumerate()
            .flat_map(|(kind, host)| {
                (1..=chain.max_replicas.min(host.hosts)).map(move |replicas| Crew { kind, replicas })
            })
            .collect();
        let barred = chain
            .types
            .iter()
            .map(|host| {
                let mut count = 0;
                std::iter::once(0)
                    .chain((0..layers).map(|layer| {
                        count += u32::from(!host.may_run.is_empty() && !host.may_run[layer]);
                        count
                    }))
                    .collect()
            })
            .collect();
        let mut held = vec![0; layers + 1];
        for (layer, &bytes) in chain.layer_bytes.iter().enumerate() {
            held[layer + 1] = held[layer] + exact(bytes);
        }
        let buffered = |position: usize| if position > 0 || !chain.input.is_empty() { chain.buffers_in } else { 0 };
        let received: Vec<i128> = (0..=layers)
            .map(|position| exact(chain.cut_bytes[position]) * (1 + i128::from(buffered(position))))
            .collect();
        let sent: Vec<i128> =
            chain.cut_bytes.iter().map(|&bytes| exact(bytes) * (1 + i128::from(chain.buffers_out))).collect();
        let memory: Vec<i128> = chain.types.iter().map(|host| exact(host.memory_bytes)).collect();
        let most = held[layers] + received.iter().max().unwrap_or(&0) + sent.iter().max().unwrap_or(&0);
        let roomy: Vec<bool> = memory.iter().map(|&memory| memory > most).collect();
        let mut least = i128::MAX;
        let light = (0..=layers)
            .map(|position| {
                let start = received[position] - held[position];
                let light = start <= least || position == layers || roomy.iter().all(|&roomy| roomy);
                least = least.min(start);
                light
            })
            .collect();
        let mut costs = Self {
            chain,
            layers,
            crews,
            time_s: chain.types.iter().map(|host| running_sums(&host.time_s)).collect(),
            barred,
            held,
            received,
            sent,
            memory,
            roomy,
            slowest_s: Vec::new(),
            light,
        };
        costs.slowest_s = (0..=layers).map(|position| costs.slowest_hop_s(position)).collect();
        costs
    }

    fn slowest_hop_s(&self, position: usize) -> f64 {
        let used = |kind: &usize| self.chain.types[*kind].hosts > 0;
        let kinds = || (0..self.chain.types.len()).filter(used);
        let bytes = self.chain.cut_bytes[position];
        let mut slowest = 0.0_f64;
        for from in kinds() {
            if position == self.layers {
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
            return self.layers;
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
                let position = path.get(index).map_or(self.layers, |step| step.first);
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
        ChainPlan { stages, hops, interval_s, latency_s, value, lower_bound, looked_at }
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
        largest.max(self.hop_interval_s(self.layers, from, None, limit_s))
    }

    fn hop_interval_s(&self, position: usize, from: Option<usize>, to: Option<usize>, limit_s: f64) -> f64 {
        let bits = self.bits_within(position, from, to, limit_s).unwrap_or(self.chain.bits[0]);
        self.hop_s(position, from, to, bits) / self.lanes(from, to)
    }
}
