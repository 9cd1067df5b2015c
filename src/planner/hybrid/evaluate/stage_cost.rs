//! Cost of one stage. Times are in seconds and sizes in bytes, both for one micro-batch unless a field states
//! otherwise.

use crate::cost::network::{Cluster, Rate};
use crate::cost::{self, LayerSums, Memory, Pace, ShardMessages, Totals};
use crate::planner::hybrid::{bounds::paths::PathStage, settings::Settings};

/// Cost of a stage in a plan.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct StageCost {
    /// Samples of a micro-batch on the replica that gets most.
    pub samples_per_replica: u32,
    /// Samples of a micro-batch on each replica, in ascending order of the device numbers. Empty if they differ by at
    /// most one sample.
    pub samples_by_replica: Vec<u32>,
    /// Forward pass of one micro-batch.
    pub forward_s: f64,
    /// Backward pass of one micro-batch, with the forward pass that recomputation repeats.
    pub backward_s: f64,
    /// Input-gradient pass of the backward, without the repeated forward. `None` if no layer has separate passes.
    pub input_gradient_s: Option<f64>,
    /// Weight-gradient pass of the backward.
    pub weight_gradient_s: Option<f64>,
    /// Transfer of one micro-batch's output to the next stage, or of its gradient back. 0 for the last stage.
    pub transfer_s: f64,
    /// Part of `transfer_s` that occupies the fullest port.
    pub transfer_busy_s: f64,
    /// Part of each pass in which the devices receive and send instead of computing. It is not in `forward_s` and
    /// `backward_s`. 0 if transfers overlap with computation.
    pub exposed_transfer_s: f64,
    /// Time by which messages of ZeRO stage 3 lengthen each forward pass. It is not in `forward_s`.
    pub exposed_forward_comm_s: f64,
    /// Time by which messages of ZeRO stages 2 and 3 lengthen each backward pass. It is not in `backward_s`.
    pub exposed_backward_comm_s: f64,
    /// Gradient all-reduce of the whole stage.
    pub grad_reduce_s: f64,
    /// Exposed gradient reduction: the part of `grad_reduce_s` behind the last backward of the stage.
    pub exposed_grad_reduce_s: f64,
    /// Memory of each device. With shares by speed, of the device with the least free memory.
    pub memory: Memory,
    /// Memory that a plan may use of the smallest device. With shares by speed, of the device that `memory` is for.
    pub capacity_bytes: f64,
    /// Memory of the devices of each share with one micro-batch in flight, and how much of it a plan may use. Empty if
    /// shares are not by speed.
    pub memory_by_share: Vec<(Memory, f64)>,
    /// Whether the backward pass recomputes the activations.
    pub recompute: bool,
    /// ZeRO stage of its replicas.
    pub zero_stage: u8,
}

impl StageCost {
    /// Returns the forward pass that a backward pass repeats, which is a part of `backward_s`.
    #[must_use]
    pub fn repeated_s(&self) -> f64 {
        if self.recompute { self.forward_s } else { 0.0 }
    }

    /// Returns whether all devices have enough memory for this number of micro-batches in flight.
    pub(crate) fn fits_with(&self, in_flight: u32) -> bool {
        let fits = |memory: &Memory, capacity_bytes: f64| memory.bytes_with(in_flight) <= capacity_bytes;
        if self.memory_by_share.is_empty() {
            return fits(&self.memory, self.capacity_bytes);
        }
        self.memory_by_share.iter().all(|(memory, capacity_bytes)| fits(memory, *capacity_bytes))
    }
}

/// Devices of a stage, regardless of its layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StageDevices {
    pub replicas: u32,
    /// Speed of the slowest device, and kinds of all devices.
    pub pace: Pace,
    /// Memory of the smallest device.
    pub memory_bytes: f64,
    /// Rate of the gradient all-reduce over all devices.
    pub sync: Rate,
}

impl StageDevices {
    /// Summarizes pairs `(node, devices)`. Pairs with 0 devices are ignored.
    pub(crate) fn of(cluster: &Cluster, counts: impl Iterator<Item = (u32, u32)>) -> Self {
        let (mut replicas, mut nodes, mut widest) = (0, 0, 0);
        // Layers are never split, so the slowest and the smallest device decide for all replicas.
        let (mut pace, mut memory_bytes) = (Pace::NONE, f64::INFINITY);
        for (node, count) in counts.filter(|&(_, count)| count > 0) {
            let node = &cluster.nodes[node as usize];
            replicas += count;
            nodes += 1;
            widest = widest.max(count);
            pace = pace.with(node);
            memory_bytes = memory_bytes.min(node.memory_bytes);
        }
        Self { replicas, pace, memory_bytes, sync: cluster.all_reduce(nodes, widest) }
    }
}

/// Cost of a stage that follows from its layers and its devices alone, with one micro-batch in flight.
/// Both `PlanEvaluator` and annealing take times and memory from here, so a plan has the same cost in both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BaseCost {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Messages of ZeRO stages 2 and 3.
    pub messages: ShardMessages,
    /// Whether the backward pass recomputes the activations.
    pub recompute: bool,
    /// Exposed gradient reduction, behind the last backward.
    pub grad_reduce_s: f64,
    pub memory: Memory,
    pub capacity_bytes: f64,
    /// Bytes of the input of one micro-batch on one device.
    pub input_bytes: f64,
    /// ZeRO stage of its replicas.
    pub zero_stage: u8,
    /// What differs at the higher ZeRO stages that the stage may take, in rising order. `None` beyond the highest.
    higher: [Option<Sharding>; 2],
}

/// What a stage holds and sends at a ZeRO stage.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sharding {
    weights_bytes: f64,
    gradients_bytes: f64,
    optimizer_bytes: f64,
    messages: ShardMessages,
}

impl BaseCost {
    /// Returns the cost of the layers between two cuts, with kept activations. `totals` has the layer sums for its
    /// samples.
    pub(crate) fn new(
        model: &LayerSums,
        totals: &Totals,
        settings: &Settings,
        devices: &StageDevices,
        cuts: (usize, usize),
        grad_reduce_s: f64,
    ) -> Self {
        // A stage is as fast as its slowest device.
        let (forward_s, backward_s) = totals.longest_s(devices.pace, cuts);
        let options = &settings.memory;
        let at = |zero_stage: u8| {
            let options = options.at_zero_stage(zero_stage);
            let messages = ShardMessages::new(model, &options, cuts, devices.sync, settings.overlap_sync);
            (cost::memory(model, totals, &options, cuts, devices.replicas, 1), messages)
        };
        let (memory, messages) = at(options.zero_stage);
        let higher = [1, 2].map(|more| {
            // One replica shares nothing.
            let is_allowed = devices.replicas > 1 && options.zero_stage + more <= options.max_zero_stage;
            is_allowed.then(|| {
                let (memory, messages) = at(options.zero_stage + more);
                let cost::Memory { weights_bytes, gradients_bytes, optimizer_bytes, .. } = memory;
                Sharding { weights_bytes, gradients_bytes, optimizer_bytes, messages }
            })
        });
        Self {
            forward_s,
            backward_s,
            messages,
            recompute: false,
            grad_reduce_s,
            memory,
            capacity_bytes: devices.memory_bytes - settings.memory.reserved_bytes,
            input_bytes: totals.boundary_bytes[cuts.0],
            zero_stage: options.zero_stage,
            higher,
        }
    }

    /// Returns the cost at the lowest ZeRO stage that the stage may take and that fits with `in_flight` micro-batches,
    /// or at the highest if none fits.
    pub(crate) fn sharded(self, in_flight: u32) -> Self {
        let mut cost = self;
        for higher in self.higher.into_iter().flatten() {
            if cost.memory.bytes_with(in_flight) <= cost.capacity_bytes {
                break;
            }
            let Sharding { weights_bytes, gradients_bytes, optimizer_bytes, messages } = higher;
            cost.memory = Memory { weights_bytes, gradients_bytes, optimizer_bytes, ..cost.memory };
            cost.messages = messages;
            cost.zero_stage += 1;
        }
        cost
    }

    /// Returns the cost with recomputed activations, from the cost with kept ones.
    pub(crate) fn recomputing(self) -> Self {
        // Recomputation repeats the forward of the whole stage before its backward.
        let backward_s = self.backward_s + self.forward_s;
        Self { backward_s, recompute: true, memory: self.memory.recomputing(self.input_bytes), ..self }
    }

    /// Returns the times by which messages lengthen the forward and the backward pass.
    pub(crate) fn exposed_comm_s(&self) -> (f64, f64) {
        self.messages.exposed_s(self.forward_s, self.backward_s, self.recompute)
    }

    /// Returns the inputs of paths and simulator for this stage, with a range of numbers in flight and its transfer:
    /// the time on the link and the latency.
    pub(crate) fn path_stage(&self, max_in_flights: (u32, u32), (busy_s, latency_s): (f64, f64)) -> PathStage {
        let (exposed_forward_s, exposed_backward_s) = self.exposed_comm_s();
        PathStage {
            forward_s: self.forward_s + exposed_forward_s,
            backward_s: self.backward_s + exposed_backward_s,
            grad_reduce_s: self.grad_reduce_s,
            min_in_flight: max_in_flights.0,
            max_in_flight: max_in_flights.1,
            busy_s,
            latency_s,
        }
    }
}

/// Returns the inputs of paths and simulator for a stage, with its smallest and largest number in flight.
pub(crate) fn path_stage(stage: &StageCost, (min_in_flight, max_in_flight): (u32, u32)) -> PathStage {
    let computing = PathStage {
        forward_s: stage.forward_s + stage.exposed_forward_comm_s,
        backward_s: stage.backward_s + stage.exposed_backward_comm_s,
        grad_reduce_s: stage.exposed_grad_reduce_s,
        min_in_flight,
        max_in_flight,
        busy_s: stage.transfer_busy_s,
        latency_s: stage.transfer_s - stage.transfer_busy_s,
    };
    computing.with_exposed_transfers(stage.exposed_transfer_s)
}

/// Returns the transfer rate between the devices of two neighboring stages, each given as pairs `(node, devices)`.
pub(super) fn transfer(cluster: &Cluster, from: &[(u32, u32)], to: &[(u32, u32)]) -> Rate {
    // Both lists ascend by node, so one pass over both finds the nodes that they share.
    let mut pairs = Vec::with_capacity(from.len() + to.len());
    let mut to = to.iter().copied().peekable();
    for &(node, senders) in from {
        while let Some((_, receivers)) = to.next_if(|&(other, _)| other < node) {
            pairs.push((0, receivers, 1));
        }
        pairs.push((senders, to.next_if(|&(other, _)| other == node).map_or(0, |(_, receivers)| receivers), 1));
    }
    pairs.extend(to.map(|(_, receivers)| (0, receivers, 1)));
    cluster.transfer(&pairs)
}
