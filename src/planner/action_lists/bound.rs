//! A lower bound on the step of every plan of a schedule, for all cuts, groups of devices, placements and orders.
//!
//! Let group r have n devices, the slowest of speed σ, and let each get q samples of each micro-batch of μ.
//! Layer l takes t(l, q) seconds forward and backward on a device of speed 1. Shares are whole numbers from the
//! smallest allowed one to μ. With several stages per device there are at least two groups, so none has all N devices:
//! q ≥ μ / (N − 1). With one stage per device, q ≥ μ / N.
//!
//! 1. *Work.* The group computes for G / μ · Σ t(l, q) / σ seconds over its layers, and n q ≥ μ. So its devices spend,
//!    in seconds of a device of speed 1, n σ · G / μ · Σ t(l, q) / σ ≥ G Σ t(l, q) / q. Sum this over all groups, and
//!    divide by the speeds of all devices, which the sum of n σ can't exceed. The result is at most the step.
//! 2. *One layer.* Some group computes G / μ times for at least t(l, q) / σ, for the layer l that is longest at its
//!    best q.
//! 3. *One micro-batch.* It passes all layers forward and then backward. Where the backward pass is split, only its
//!    first half counts. The other micro-batches take at least one more pass each, forward or backward, of the layer
//!    whose pass is longest: in any order, the first backward of this layer comes after the way of a micro-batch down
//!    to the last layer, and the last one before a way up. The same holds for forwards.
//!
//! A schedule that splits backward passes may still run some of them whole. So where both halves are known, t(l, q) has
//! the smaller one of the whole pass and both halves, and the way back the smaller one of the whole pass and the first
//! half.
//!
//! A sum in which each layer takes its own best q is at most the sum in which all layers of a stage use one q.
//! Between two measured batch sizes t(l, q) is linear in q, so t(l, q) / q = a / q + b is monotone there. Hence both
//! have their minimum over a range of sizes at an end of the range or at a measured size in it.

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::planner::hybrid::{self, AnyOrder, AnyOrderBound, Recompute, Settings};
use crate::schedule::Family;

use super::Problem;
use super::one_stage::SEQUENTIAL;

/// Bounds the step of every plan of a schedule with one stage per device that fits memory. `step_s` is the step of one
/// of them, and the bound is at most that.
pub(super) fn one_stage_bound(problem: &Problem<'_>, family: &Family, step_s: f64, control: &Control) -> AnyOrderBound {
    let Problem { model, cluster, settings } = *problem;
    let floors: Vec<(u32, f64)> = lower_bounds_s(model, cluster, settings, family, cluster.devices()).collect();
    // The second bound is about the cuts of the model, so it needs all of them.
    if !model.has_all_cuts {
        let lower_bound_s = floors.iter().map(|floor| floor.1).fold(step_s, f64::min);
        return AnyOrderBound { lower_bound_s, rows: Vec::new() };
    }
    hybrid::min_step_of_any_order_s((model, cluster, settings), any_order(family), (&floors, step_s), control)
}

/// Returns the properties of a schedule that its bound uses.
pub(super) fn any_order(family: &Family) -> AnyOrder {
    AnyOrder { splits_backward: family.splits_backward, is_sequential: family.name == SEQUENTIAL }
}

/// Returns a lower bound, in seconds, on the step of every plan of a schedule whose groups have at most `max_replicas`
/// devices.
#[must_use]
pub fn lower_bound_s(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    family: &Family,
    max_replicas: u32,
) -> f64 {
    lower_bounds_s(model, cluster, settings, family, max_replicas)
        .map(|(_, bound_s)| bound_s)
        .fold(f64::INFINITY, f64::min)
}

/// Returns each micro-batch size with a lower bound on the step of its plans.
fn lower_bounds_s(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    family: &Family,
    max_replicas: u32,
) -> impl Iterator<Item = (u32, f64)> {
    let speeds: f64 = cluster.nodes.iter().map(|node| f64::from(node.devices) * node.speed).sum();
    let fastest = cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max);
    let recomputes = settings.recompute.iter().all(|&choice| choice == Recompute::Always);
    settings.pipeline_micro_batch_sizes.iter().map(move |&micro_batch| {
        // The smallest number of samples that any replica gets.
        let min = micro_batch.div_ceil(max_replicas.max(1)).max(settings.min_samples_per_replica);
        let min_layers = MinLayers::of(model, min.min(micro_batch), micro_batch, recomputes, family);
        let batch = f64::from(settings.global_batch);
        let work_s = batch * min_layers.work_s_per_sample / speeds;
        let layer_s = batch / f64::from(micro_batch) * min_layers.max_s / fastest;
        let others = batch / f64::from(micro_batch) - 1.0;
        let trip_s = (min_layers.trip_s + others * min_layers.max_pass_s) / fastest;
        (micro_batch, work_s.max(layer_s).max(trip_s))
    })
}

/// Minimum times of layers over a range of sizes, on a device of speed 1.
struct MinLayers {
    /// Sum over all layers: forward and backward seconds per sample.
    work_s_per_sample: f64,
    /// Longest layer: forward and backward seconds for one number of samples.
    max_s: f64,
    /// Sum over all layers: seconds for one number of samples forward, and of its way back.
    trip_s: f64,
    /// Longest pass of a layer: seconds of a forward, or of one layer on the way back.
    max_pass_s: f64,
}

impl MinLayers {
    /// Computes the minima for samples per replica from `min` to `max`.
    fn of(model: &LayerSums, min: u32, max: u32, recomputes: bool, family: &Family) -> Self {
        // The minimum is at an end of the range or at a measured size (see above), so these suffice.
        let measured = model.batch_sizes().iter().copied().filter(|size| (min..=max).contains(size));
        let sizes: Vec<u32> = [min, max].into_iter().chain(measured).collect();
        let totals: Vec<_> = sizes.iter().map(|&samples_per_replica| model.totals(samples_per_replica)).collect();
        let (mut work_s_per_sample, mut max_s, mut trip_s, mut max_pass_s) = (0.0, 0.0_f64, 0.0, 0.0_f64);
        for layer in 0..model.layer_parameter_bytes.len() {
            // Each of the minima may be at another number of samples. That only lowers the bound.
            let [mut per_sample_s, mut both_s, mut way_s, mut down_s, mut up_s] = [f64::INFINITY; 5];
            for (&samples_per_replica, totals) in sizes.iter().zip(&totals) {
                let once_s = totals.layer_forward_s[layer];
                let repeated_s = if recomputes { once_s } else { 0.0 };
                let forward_s = once_s + repeated_s;
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
                down_s = down_s.min(once_s);
                up_s = up_s.min(repeated_s + back_s);
            }
            work_s_per_sample += per_sample_s;
            max_s = max_s.max(both_s);
            trip_s += way_s;
            max_pass_s = max_pass_s.max(down_s).max(up_s);
        }
        Self { work_s_per_sample, max_s, trip_s, max_pass_s }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fit::run_under;
    use super::super::{ONE_STAGE, every_plan};
    use super::*;
    use crate::model::states::{CutPoints, DEFAULT_BOUND};
    use crate::planner::hybrid::PlanEvaluator;
    use crate::planner::random_problems::{RandomProblem, branching, few_layers_on_many_devices, problems};
    use crate::schedule::family;

    /// Checks the bound of a schedule against the run of every plan that fits. `halves` has the share of each layer's
    /// backward that its input gradient and its weight gradient take. The bound knows a step `slack` times as long as
    /// the shortest.
    fn bounds_every_plan(
        problem: RandomProblem,
        name: &str,
        halves: Option<(f64, f64)>,
        slack: f64,
    ) -> Result<(), TestCaseError> {
        let RandomProblem { mut graph, cluster, settings, .. } = problem;
        for measured in graph.layers.iter_mut().flat_map(|layer| &mut layer.measured) {
            measured.halves_s =
                halves.map(|(input, weight)| (input * measured.backward_s, weight * measured.backward_s));
        }
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        let model = LayerSums::new(&graph, &states);
        let problem = Problem { model: &model, cluster: &cluster, settings: &settings };
        let Some(plans) = every_plan::every_plan(&problem) else { return Ok(()) };
        let family = family(name).unwrap();
        let mut evaluator = PlanEvaluator::new(&model, &cluster, &settings);
        let mut min_s = f64::INFINITY;
        for plan in plans {
            let Ok(costs) = evaluator.stages(&plan) else { continue };
            let ranks: Vec<u32> = (0..costs.len() as u32).collect();
            let micro_batches = settings.global_batch / plan.micro_batch;
            let (_, run) = run_under(family, &costs, &ranks, micro_batches).unwrap();
            let own_s = any_order(family).min_step_s(&costs, micro_batches);
            prop_assert!(own_s <= run.step_s * (1.0 + 1e-9), "{own_s} and {} of {plan:?}", run.step_s);
            if run.fits() {
                min_s = min_s.min(run.step_s);
            }
        }
        if min_s.is_finite() {
            let bound_s = one_stage_bound(&problem, family, slack * min_s, &Control::default()).lower_bound_s;
            prop_assert!(bound_s <= min_s * (1.0 + 1e-9), "{bound_s} and {min_s} of {name}");
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_plan_is_shorter_than_the_bound_of_its_schedule(
            problem in prop_oneof![3 => problems(), 1 => branching(), 1 => few_layers_on_many_devices()],
            name in prop::sample::select(&ONE_STAGE),
            halves in prop::option::of((0.2..1.0, 0.2..1.0)),
            slack in 1.05..2.0,
        ) {
            bounds_every_plan(problem, name, halves, slack)?;
        }
    }
}
