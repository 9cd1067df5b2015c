//! Messages of ZeRO stages 2 and 3 in each pass of a stage (Rajbhandari et al., SC20; docs/planner.md).

use super::layer_sums::LayerSums;
use super::memory::MemoryModel;
use super::network::Rate;
use super::tied_weights;

/// Messages between the replicas of a stage for one micro-batch, in seconds. All are 0 below ZeRO stage 2.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ShardMessages {
    /// All-gather of the weights of all layers, once. 0 below ZeRO stage 3.
    pub gather_s: f64,
    /// Reduce-scatter of the gradients of all layers.
    pub scatter_s: f64,
    /// Whether messages pass while the replicas compute.
    overlap: bool,
}

impl ShardMessages {
    /// Returns the messages of the stage between two cuts, whose all-reduce takes `rate`.
    #[must_use]
    pub fn new(model: &LayerSums, options: &MemoryModel, stage: (usize, usize), rate: Rate, overlap: bool) -> Self {
        // The default rate stands for a stage with one replica, which has nothing to exchange.
        if options.zero_stage < 2 || rate == Rate::default() {
            return Self::default();
        }
        // A ring all-reduce is a reduce-scatter and an all-gather of the same bytes and the same number of hops.
        let half_s =
            |bytes: f64| if bytes > 0.0 { f64::midpoint(bytes * rate.s_per_byte, rate.latency_s) } else { 0.0 };
        let copied_s: f64 = tied_weights::copies(model, stage).map(half_s).sum();
        let (mut gather_s, mut scatter_s) = (copied_s, copied_s);
        for layer in model.layers_between(stage.0, stage.1) {
            let trained_bytes = model.layer_parameter_bytes[layer as usize];
            scatter_s += half_s(trained_bytes);
            gather_s += half_s(trained_bytes + model.layer_frozen_bytes[layer as usize]);
        }
        Self { gather_s: if options.zero_stage == 3 { gather_s } else { 0.0 }, scatter_s, overlap }
    }

    /// Returns the seconds by which messages lengthen the forward and the backward pass of a stage, whose computation
    /// takes these times. The time of the backward includes the repeated forward if the stage recomputes.
    #[must_use]
    pub fn exposed_s(&self, forward_s: f64, backward_s: f64, recompute: bool) -> (f64, f64) {
        let exposed_s =
            |messages_s: f64, pass_s: f64| if self.overlap { (messages_s - pass_s).max(0.0) } else { messages_s };
        // The repeated forward gathers the weights, and the backward behind it gathers them again.
        let gathers = if recompute { 2.0 } else { 1.0 };
        (exposed_s(self.gather_s, forward_s), exposed_s(gathers * self.gather_s + self.scatter_s, backward_s))
    }
}
