//! What every plan with several stages a device takes at least, whatever its cuts, groups, placement and order.
//!
//! Let group r be n devices, the slowest of speed σ, that get a share of q samples of each micro-batch of μ; layer l takes
//! t(l, q) seconds forward and backward on a device of speed 1. Shares are whole numbers from the smallest one allowed to
//! μ, and as there are two groups at least, no group has all N devices: q ≥ μ / (N − 1).
//!
//! 1. *Work.* The group computes for G / μ · Σ t(l, q) / σ seconds over its layers, and n q ≥ μ. So its devices spend, in
//!    seconds of a device of speed 1, n σ · G / μ · Σ t(l, q) / σ ≥ G Σ t(l, q) / q. Summed over all groups and divided by
//!    the speeds of all devices, which the groups' n σ can't exceed, that is no more than the step.
//! 2. *One layer.* Some group computes G / μ times for t(l, q) / σ at least, for the layer l that is longest at its best.
//! 3. *One micro-batch.* It goes through all layers and back; where the backward is split, through its first half.
//!
//! A schedule that splits the backward runs each pass whole or in halves, so where these are known t(l, q) has the lesser of
//! both, and the way back the lesser of the whole and the first half.
//!
//! A sum in which each layer takes its own best q is at most the sum in which all layers of a stage share one. Between
//! two batch sizes that were measured t(l, q) is linear in q, so t(l, q) / q = a / q + b falls or rises there: the least
//! of either over a range of shares is at its ends or at a measured size in it.

use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::planner::hybrid::Settings;
use crate::schedule::Family;

/// Seconds that no plan with several stages a device goes below.
#[must_use]
pub fn lower_bound_s(model: &LayerSums, cluster: &Cluster, settings: &Settings, family: &Family) -> f64 {
    let devices = cluster.devices();
    let speeds: f64 = cluster.machines.iter().map(|machine| f64::from(machine.devices) * machine.speed).sum();
    let fastest = cluster.machines.iter().map(|machine| machine.speed).fold(0.0, f64::max);
    let recomputes = settings.recompute.iter().all(|&recompute| recompute);
    (settings.micro_batch_sizes.iter())
        .map(|&micro_batch| {
            let least = micro_batch.div_ceil(devices.saturating_sub(1).max(1)).max(settings.min_samples_per_replica);
            let min_layers = LeastLayers::of(model, least.min(micro_batch), micro_batch, recomputes, family);
            let batch = f64::from(settings.global_batch);
            let work_s = batch * min_layers.work_s_per_sample / speeds;
            let layer_s = batch / f64::from(micro_batch) * min_layers.max_s / fastest;
            work_s.max(layer_s).max(min_layers.trip_s / fastest)
        })
        .fold(f64::INFINITY, f64::min)
}

/// The least that layers take, on a device of speed 1.
struct LeastLayers {
    /// Of all layers, forward and backward, for one sample of a share.
    work_s_per_sample: f64,
    /// Of the longest layer, forward and backward, for one share.
    max_s: f64,
    /// Of all layers, down and up again.
    trip_s: f64,
}

impl LeastLayers {
    /// For shares from `least` to `most`.
    fn of(model: &LayerSums, least: u32, most: u32, recomputes: bool, family: &Family) -> Self {
        let measured = model.batch_sizes().iter().copied().filter(|size| (least..=most).contains(size));
        let shares: Vec<u32> = [least, most].into_iter().chain(measured).collect();
        let totals: Vec<_> = shares.iter().map(|&share| model.totals(share)).collect();
        let (mut work_s_per_sample, mut max_s, mut trip_s) = (0.0, 0.0_f64, 0.0);
        for layer in 0..model.layer_parameter_bytes.len() {
            let (mut per_sample_s, mut both_s, mut way_s) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
            for (&share, totals) in shares.iter().zip(&totals) {
                let forward_s = totals.layer_forward_s[layer] * if recomputes { 2.0 } else { 1.0 };
                let whole_s = totals.layer_backward_s[layer];
                let (input_s, weight_s) = totals.layer_halves_s(layer);
                let (backward_s, back_s) = if family.splits_backward {
                    (whole_s.min(input_s + weight_s), whole_s.min(input_s))
                } else {
                    (whole_s, whole_s)
                };
                per_sample_s = per_sample_s.min((forward_s + backward_s) / f64::from(share));
                both_s = both_s.min(forward_s + backward_s);
                way_s = way_s.min(forward_s + back_s);
            }
            work_s_per_sample += per_sample_s;
            max_s = max_s.max(both_s);
            trip_s += way_s;
        }
        Self { work_s_per_sample, max_s, trip_s }
    }
}
