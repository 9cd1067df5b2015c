//! A lower bound on the step of every plan with several stages per device, for all cuts, groups, placements and
//! schedules.
//!
//! Let group r have n devices, the slowest of speed σ, and let each get q samples of each micro-batch of μ.
//! Layer l takes t(l, q) seconds forward and backward on a device of speed 1. Shares are whole numbers from the
//! smallest allowed one to μ. Since there are at least two groups, no group has all N devices: q ≥ μ / (N − 1).
//!
//! 1. *Work.* The group computes for G / μ · Σ t(l, q) / σ seconds over its layers, and n q ≥ μ. So its devices spend,
//!    in seconds of a device of speed 1, n σ · G / μ · Σ t(l, q) / σ ≥ G Σ t(l, q) / q. Sum this over all groups, and
//!    divide by the speeds of all devices, which the sum of n σ can't exceed. The result is at most the step.
//! 2. *One layer.* Some group computes G / μ times for at least t(l, q) / σ, for the layer l that is longest at its
//!    best q.
//! 3. *One micro-batch.* It passes all layers forward and then backward. Where the backward pass is split, only its
//!    first half counts.
//!
//! A schedule that splits backward passes may still run some of them whole. So where both halves are known, t(l, q) has
//! the smaller one of the whole pass and both halves, and the way back the smaller one of the whole pass and the first
//! half.
//!
//! A sum in which each layer takes its own best q is at most the sum in which all layers of a stage use one q.
//! Between two measured batch sizes t(l, q) is linear in q, so t(l, q) / q = a / q + b is monotone there. Hence both
//! have their minimum over a range of sizes at an end of the range or at a measured size in it.

use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::planner::hybrid::Settings;
use crate::schedule::Family;

/// Returns a lower bound, in seconds, on the step of every plan with several stages per device.
#[must_use]
pub fn lower_bound_s(model: &LayerSums, cluster: &Cluster, settings: &Settings, family: &Family) -> f64 {
    let devices = cluster.devices();
    let speeds: f64 = cluster.nodes.iter().map(|node| f64::from(node.devices) * node.speed).sum();
    let fastest = cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max);
    let recomputes = settings.recompute.iter().all(|&recompute| recompute);
    (settings.pipeline_micro_batch_sizes.iter())
        .map(|&micro_batch| {
            // No group has all devices, so this is the smallest number of samples that any replica gets.
            let min = micro_batch.div_ceil(devices.saturating_sub(1).max(1)).max(settings.min_samples_per_replica);
            let min_layers = MinLayers::of(model, min.min(micro_batch), micro_batch, recomputes, family);
            let batch = f64::from(settings.global_batch);
            let work_s = batch * min_layers.work_s_per_sample / speeds;
            let layer_s = batch / f64::from(micro_batch) * min_layers.max_s / fastest;
            work_s.max(layer_s).max(min_layers.trip_s / fastest)
        })
        .fold(f64::INFINITY, f64::min)
}

/// Minimum times of layers over a range of sizes, on a device of speed 1.
struct MinLayers {
    /// Sum over all layers: forward and backward seconds per sample.
    work_s_per_sample: f64,
    /// Longest layer: forward and backward seconds for one number of samples.
    max_s: f64,
    /// Sum over all layers: seconds for one number of samples forward, and of its way back.
    trip_s: f64,
}

impl MinLayers {
    /// Computes the minima for samples per replica from `min` to `max`.
    fn of(model: &LayerSums, min: u32, max: u32, recomputes: bool, family: &Family) -> Self {
        // The minimum is at an end of the range or at a measured size (see above), so these suffice.
        let measured = model.batch_sizes().iter().copied().filter(|size| (min..=max).contains(size));
        let sizes: Vec<u32> = [min, max].into_iter().chain(measured).collect();
        let totals: Vec<_> = sizes.iter().map(|&samples_per_replica| model.totals(samples_per_replica)).collect();
        let (mut work_s_per_sample, mut max_s, mut trip_s) = (0.0, 0.0_f64, 0.0);
        for layer in 0..model.layer_parameter_bytes.len() {
            // Each of the three minima may be at another number of samples. That only lowers the bound.
            let (mut per_sample_s, mut both_s, mut way_s) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
            for (&samples_per_replica, totals) in sizes.iter().zip(&totals) {
                let forward_s = totals.layer_forward_s[layer] * if recomputes { 2.0 } else { 1.0 };
                let whole_s = totals.layer_backward_s[layer];
                let (input_s, weight_s) = totals.layer_halves_s(layer);
                let (backward_s, back_s) = if family.splits_backward {
                    (whole_s.min(input_s + weight_s), whole_s.min(input_s))
                } else {
                    (whole_s, whole_s)
                };
                per_sample_s = per_sample_s.min((forward_s + backward_s) / f64::from(samples_per_replica));
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
