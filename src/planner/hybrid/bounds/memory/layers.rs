//! Conditions 1 and 2 of lemma *Memory* (docs/proofs.md): each layer fits some devices, and all layers together fit all
//! devices, however they are put into stages.

use super::{Conditions, ROUNDING};
use crate::planner::effort::bounds;
use crate::planner::hybrid::subproblem::Subproblem;

/// Returns the share of the largest device that something counts as. For sizes that fit the largest device together, the sum
/// of what they count as is at most what the sum of the sizes counts as.
fn counted(bytes: f64, largest_bytes: f64, smallest: f64) -> f64 {
    let share = if largest_bytes > 0.0 { bytes / largest_bytes } else { 0.0 };
    if smallest > 0.0 && share > 1.0 - smallest {
        1.0
    } else if share < smallest {
        0.0
    } else {
        share
    }
}

impl Conditions<'_> {
    /// Returns whether each layer fits some devices, and all layers together fit all devices.
    pub(super) fn fit_layers(&self) -> bool {
        let Subproblem { model, recompute, .. } = *self.task;
        let in_flight = if recompute { 1.0 } else { f64::from(self.in_flight(1)) };
        // Stages on one device recompute one after another. Otherwise all hold the first micro-batch when its last forward ends.
        let are_all_saved = self.schedules.one_stage_a_device || !recompute;
        let largest_bytes = self.capacities.last().map_or(0.0, |&(capacity_bytes, _)| capacity_bytes.max(0.0));
        // What fits a device of at most so much memory is not counted, nor are these devices.
        let smaller = self.capacities.iter().rev().skip(1).take(bounds::MAX_CAPACITIES_LEFT_OUT);
        let floors: Vec<f64> = smaller.map(|&(capacity_bytes, _)| capacity_bytes).chain([f64::NEG_INFINITY]).collect();
        let ways = || floors.iter().flat_map(|&floor| bounds::EPSILONS.map(|smallest| (floor, smallest)));
        let mut sums = vec![0.0; floors.len() * bounds::EPSILONS.len()];
        for (layer, &parameter_bytes) in model.layer_parameter_bytes.iter().enumerate() {
            let mut least = vec![f64::INFINITY; sums.len()];
            for &(fewest, most, share) in &self.splits {
                // What one replica holds, without what is received and sent.
                let weights_bytes = parameter_bytes * self.of_weight(most) * (1.0 - ROUNDING);
                let saved_bytes = in_flight * self.task.totals[share].layer_saved_bytes[layer] * (1.0 - ROUNDING);
                let held_bytes = weights_bytes + saved_bytes;
                if self.capacity_bytes(held_bytes, fewest).is_none() {
                    continue;
                }
                let summed_bytes = if are_all_saved { held_bytes } else { weights_bytes };
                for (least, (floor, smallest)) in least.iter_mut().zip(ways()) {
                    let is_counted = held_bytes > floor;
                    let part = if is_counted { counted(summed_bytes, largest_bytes, smallest) } else { 0.0 };
                    *least = least.min(f64::from(fewest) * part);
                }
            }
            if least[0].is_infinite() {
                return false;
            }
            sums.iter_mut().zip(least).for_each(|(sum, least)| *sum += least);
        }
        sums.into_iter().zip(ways()).all(|(sum, (floor, smallest))| {
            let capacities = (self.task.cluster.machines.iter())
                .map(|machine| (machine.devices, machine.memory_bytes - self.task.settings.memory.reserved_bytes));
            let all: f64 = capacities
                .filter(|&(_, capacity_bytes)| capacity_bytes > floor)
                .map(|(devices, capacity_bytes)| {
                    f64::from(devices) * counted(capacity_bytes.max(0.0), largest_bytes, smallest)
                })
                .sum();
            sum * (1.0 - ROUNDING) <= all
        })
    }
}
