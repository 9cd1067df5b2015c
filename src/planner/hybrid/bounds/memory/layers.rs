//! Conditions 1 and 2 of lemma *Memory* (docs/proofs.md): each layer fits some devices, and all layers together fit all
//! devices, for any division into stages.

use super::{Conditions, ROUNDING};
use crate::planner::effort::bounds;
use crate::planner::hybrid::{settings::Recompute, subproblem::Subproblem};

/// Returns f(x) of docs/proofs.md, *Memory*, where x is the share of the largest device that `bytes` take. With ε =
/// `epsilon`, f(x) is 0 below ε, 1 above 1 − ε, and x between.
///
/// The function is superadditive: if sizes fit one device together, the sum of their values is at most the value of
/// their sum.
fn superadditive(bytes: f64, largest_bytes: f64, epsilon: f64) -> f64 {
    let share = if largest_bytes > 0.0 { bytes / largest_bytes } else { 0.0 };
    if epsilon > 0.0 && share > 1.0 - epsilon {
        1.0
    } else if share < epsilon {
        0.0
    } else {
        share
    }
}

impl Conditions<'_> {
    /// Returns whether each layer fits some devices, and all layers together fit all devices.
    pub(super) fn fit_layers(&self) -> bool {
        let Subproblem { model, recompute, .. } = *self.task;
        let in_flight = if recompute == Recompute::Never { f64::from(self.in_flight(1)) } else { 1.0 };
        // When the last forward of micro-batch 0 ends, several stages on one device all hold what they save of it. But
        // if they recompute, they need not do so at the same moment, so only weights are summed.
        let are_all_saved = self.schedules.one_stage_a_device || recompute == Recompute::Never;
        let largest_bytes = self.capacities.last().map_or(0.0, |&(capacity_bytes, _)| capacity_bytes.max(0.0));
        // The condition also holds for large devices alone. Then sizes that fit a smaller device count 0, and so do the
        // smaller devices.
        let smaller = self.capacities.iter().rev().skip(1).take(bounds::MAX_CAPACITIES_LEFT_OUT);
        let min_sizes: Vec<f64> =
            smaller.map(|&(capacity_bytes, _)| capacity_bytes).chain([f64::NEG_INFINITY]).collect();
        let conditions =
            || min_sizes.iter().flat_map(|&min_bytes| bounds::EPSILONS.map(|epsilon| (min_bytes, epsilon)));
        let mut sums = vec![0.0; min_sizes.len() * bounds::EPSILONS.len()];
        for (layer, (&trained_bytes, &frozen_bytes)) in
            model.layer_parameter_bytes.iter().zip(&model.layer_frozen_bytes).enumerate()
        {
            let mut min_counts = vec![f64::INFINITY; sums.len()];
            for &(min_replicas, max_replicas, totals_index) in &self.replica_ranges {
                // Leave out receive and send buffers, since they depend on the cuts. The result is a lower bound.
                let (of_trained, of_frozen) = self.bytes_per_weight_byte(max_replicas);
                let weights_bytes = (trained_bytes * of_trained + frozen_bytes * of_frozen) * (1.0 - ROUNDING);
                let saved_bytes =
                    in_flight * self.task.totals[totals_index].layer_saved_bytes[layer] * (1.0 - ROUNDING);
                let held_bytes = weights_bytes + saved_bytes;
                if self.capacity_bytes(held_bytes, min_replicas).is_none() {
                    continue;
                }
                let summed_bytes = if are_all_saved { held_bytes } else { weights_bytes };
                for (min_count, (min_bytes, epsilon)) in min_counts.iter_mut().zip(conditions()) {
                    let is_counted = held_bytes > min_bytes;
                    let count = if is_counted { superadditive(summed_bytes, largest_bytes, epsilon) } else { 0.0 };
                    *min_count = min_count.min(f64::from(min_replicas) * count);
                }
            }
            if min_counts[0].is_infinite() {
                return false;
            }
            sums.iter_mut().zip(min_counts).for_each(|(sum, min_count)| *sum += min_count);
        }
        sums.into_iter().zip(conditions()).all(|(sum, (min_bytes, epsilon))| {
            let capacities = (self.task.cluster.nodes.iter())
                .map(|node| (node.devices, node.memory_bytes - self.task.settings.memory.reserved_bytes));
            let all: f64 = capacities
                .filter(|&(_, capacity_bytes)| capacity_bytes > min_bytes)
                .map(|(devices, capacity_bytes)| {
                    f64::from(devices) * superadditive(capacity_bytes.max(0.0), largest_bytes, epsilon)
                })
                .sum();
            sum * (1.0 - ROUNDING) <= all
        })
    }
}
