//! Lemma *All cuts* (docs/proofs.md#all-cuts): a lower bound on the step of every plan, regardless of its cuts.
//!
//! The other bounds hold for plans with the cuts of [`LayerSums`] only. Where these are not all cuts of the layer
//! graph, this bound replaces them. No step with M micro-batches is shorter than:
//!
//! 1. the work of all layers divided by the speed of all useful devices (`devices_at_work`);
//! 2. M times the shortest time of any single layer, on the fastest device;
//! 3. one micro-batch through all layers, and M − 1 passes of the layer with the longest one, on the fastest device.
//!
//! It counts neither transfers nor memory, so it is weaker than the others: gaps of 1 % to 20 % are common.

use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::planner::hybrid::{bounds::devices_at_work::busy_s, settings::Settings, subproblem::Subproblem};

/// Returns a lower bound on the step of all plans in seconds, over all micro-batch sizes and all cuts of the layer
/// graph.
#[must_use]
pub fn min_step_s(model: &LayerSums, cluster: &Cluster, settings: &Settings) -> f64 {
    Subproblem::all(model, cluster, settings).iter().map(min_step_of_size_s).fold(f64::INFINITY, f64::min)
}

/// Returns the bound for one micro-batch size.
pub(crate) fn min_step_of_size_s(task: &Subproblem<'_>) -> f64 {
    let fastest = task.cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max);
    let totals_of_shares =
        || task.totals_index.iter().flatten().map(|&totals_index| &task.totals[totals_index as usize]);
    let (mut trip_s, mut max_pass_s, mut max_s) = (0.0, 0.0_f64, 0.0_f64);
    for layer in 0..task.model.layer_parameter_bytes.len() {
        // Replicas that make the forward shortest need not make the backward shortest. The sum has a minimum of its
        // own, which is at least the sum of both minima.
        let (mut forward_s, mut backward_s, mut both_s) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        for totals in totals_of_shares() {
            let once_s = totals.layer_forward_s[layer];
            let back_s = totals.layer_backward_s[layer] + (task.recompute.min_forwards() - 1.0) * once_s;
            forward_s = forward_s.min(once_s);
            backward_s = backward_s.min(back_s);
            both_s = both_s.min(once_s + back_s);
        }
        trip_s += both_s;
        max_pass_s = max_pass_s.max(forward_s).max(backward_s);
        max_s = max_s.max(both_s);
    }
    let micro_batches = f64::from(task.micro_batches);
    // While the slowest layer runs its other M - 1 forwards, or backwards, micro-batch 0 and the last one pass each
    // layer once forward and once backward in sum.
    let through_s = trip_s + (micro_batches - 1.0) * max_pass_s;
    busy_s(task).max(through_s.max(micro_batches * max_s) / fastest)
}
