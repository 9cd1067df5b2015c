//! Plans whose replicas may get shares of a micro-batch by their speed.
//!
//! A plan has even shares in all stages, or shares by speed in all stages. The search for even shares comes first, with
//! all its bounds. Shares by speed are evaluated on every plan of a small problem. Otherwise local search starts from the
//! best plan with even shares and from plans for pipelines of at most 1, 2, 4, … stages. Each of these is the best one
//! found with even shares, on the cluster and on devices that all have the mean speed. With shares by speed, a stage is
//! about as fast as if its devices had one speed.
//!
//! The bounds of the first search do not hold for other shares. The bound here ([`action_lists::lower_bound_s`]) counts
//! the work of a sample, so it holds however a micro-batch is divided (docs/proofs.md#shares-by-speed).

use crate::control::{Control, Reports};
use crate::cost::LayerSums;
use crate::cost::network::{Cluster, Node};
use crate::error::{Error, Result};
use crate::planner::action_lists;
use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{
    self, CandidatePlan, EvaluatedPlan, Exhausted, PlanEvaluator, SearchResult, Settings, exhaustive_within,
    improve_stages, no_plan_fits,
};
use crate::schedule::family;

/// Returns the best plan with even shares or with shares by speed, and whether it has the latter.
///
/// # Errors
/// Returns the errors of [`hybrid::plan`]. If no plan with even shares fits, shares by speed are still tried.
pub fn plan(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<(SearchResult, bool)> {
    let even_settings = Settings { shares_by_speed: false, ..settings.clone() };
    let is_mixed = cluster.nodes.windows(2).any(|two| (two[0].speed, two[0].kind) != (two[1].speed, two[1].kind));
    if !is_mixed {
        return Ok((hybrid::plan(model, cluster, &even_settings, control)?, false));
    }
    // Half of the time is left for shares by speed. The bound of even shares is not one for all plans.
    let even = hybrid::plan(model, cluster, &even_settings, &control.part(0.5, Reports::Best));
    if !matches!(&even, Ok(_) | Err(Error::Infeasible { .. })) {
        return Ok((even?, false));
    }
    let all = exhaustive_within(model, cluster, settings, control, effort::EVERY_PLAN_ACTIONS);
    let (found, is_every_plan) = match all {
        Ok(Exhausted::Best(plan, evaluated)) => (Some((plan, evaluated)), true),
        Ok(Exhausted::NothingFits) => (None, true),
        // A stopped enumeration leaves no time for local search either, which then returns its first plan.
        Ok(Exhausted::TooMany) | Err(_) => {
            (local_search(model, cluster, settings, even.as_ref().ok(), control)?, false)
        }
    };
    let work_bound_s = action_lists::lower_bound_s(model, cluster, settings, family("1f1b")?, u32::MAX);
    best(even.ok(), found, is_every_plan, work_bound_s).ok_or_else(|| {
        if is_every_plan {
            return no_plan_fits();
        }
        Error::infeasible("no plan was found that fits", "use more devices, or devices with more memory")
    })
}

/// Returns the better one of two plans, with a bound for both kinds of shares, and whether it has shares by speed.
/// Returns `None` if there is neither.
fn best(
    even: Option<SearchResult>,
    found: Option<(CandidatePlan, EvaluatedPlan)>,
    is_every_plan: bool,
    work_bound_s: f64,
) -> Option<(SearchResult, bool)> {
    let even_bound_s = even.as_ref().map_or(f64::INFINITY, |even| even.lower_bound_s);
    let by_speed_bound_s = match &found {
        Some((_, evaluated)) if is_every_plan => evaluated.step_s,
        None if is_every_plan => f64::INFINITY,
        _ => 0.0,
    };
    let (labels, simulated, stopped) =
        even.as_ref().map_or((0, 0, None), |even| (even.labels, even.simulated, even.stopped));
    let even_s = even.as_ref().map_or(f64::INFINITY, |even| even.evaluated.step_s);
    let found = found.filter(|(_, evaluated)| evaluated.step_s < even_s);
    let has_shares_by_speed = found.is_some();
    let chosen = found.or_else(|| even.map(|even| (even.plan, even.evaluated)));
    let (plan, evaluated) = chosen?;
    let lower_bound_s = work_bound_s.max(even_bound_s.min(by_speed_bound_s)).min(evaluated.step_s);
    let result = SearchResult {
        plan,
        evaluated,
        lower_bound_s,
        // The bound holds for all cuts and placements, or all of them were tried.
        searched_cuts_bound_s: None,
        node_aligned_bound_s: None,
        stopped,
        labels,
        simulated,
    };
    Some((result, has_shares_by_speed))
}

/// Returns the best plan with shares by speed that local search finds. `even` is the best plan with even shares.
fn local_search(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    even: Option<&SearchResult>,
    control: &Control,
) -> Result<Option<(CandidatePlan, EvaluatedPlan)>> {
    let even_settings = Settings { shares_by_speed: false, ..settings.clone() };
    let mut evaluator = PlanEvaluator::new(model, cluster, settings);
    let mut best: Option<(f64, CandidatePlan)> = None;
    let mut starts: Vec<CandidatePlan> = even.map(|even| even.plan.clone()).into_iter().collect();
    let devices = cluster.devices();
    let max = settings.max_stages.min(model.layer_parameter_bytes.len() as u32).min(devices);
    let level = at_mean_speed(cluster);
    let quiet = || control.part(1.0, Reports::Nothing);
    starts
        .extend(hybrid::plan_without_last_search(model, &level, &even_settings, &quiet()).ok().map(|found| found.plan));
    for depth in (0..32).map(|power| 1 << power).take_while(|&depth| depth <= max) {
        let of_depth = Settings { max_stages: depth, max_replicas: devices.div_ceil(depth), ..even_settings.clone() };
        for cluster in [cluster, &level] {
            if control.should_stop() {
                break;
            }
            let found = hybrid::fitting(model, cluster, &of_depth, &quiet());
            starts.extend(found.ok().map(|found| found.plan));
        }
    }
    for start in starts {
        if best.is_some() && control.should_stop() {
            break;
        }
        let found = improve_stages(&mut evaluator, &start.stages, control)?;
        if let Some(found) = found.filter(|found| best.as_ref().is_none_or(|best| found.0 < best.0)) {
            best = Some(found);
        }
    }
    let Some((_, plan)) = best else { return Ok(None) };
    let evaluated = evaluator.evaluate(&plan)?;
    Ok(Some((plan, evaluated)))
}

/// Returns the cluster with the mean speed of its devices on all nodes. With times by device type, which have no speed,
/// all nodes have the times of the first one.
fn at_mean_speed(cluster: &Cluster) -> Cluster {
    let speeds: f64 = cluster.nodes.iter().map(|node| f64::from(node.devices) * node.speed).sum();
    let first = cluster.nodes[0];
    let has_kinds = cluster.nodes.iter().any(|node| node.kind != first.kind);
    let speed = if has_kinds { first.speed } else { speeds / f64::from(cluster.devices()) };
    let nodes = cluster.nodes.iter().map(|node| Node { speed, kind: first.kind, ..*node }).collect();
    Cluster { nodes, ..cluster.clone() }
}
