//! Plans with less memory and a step that is only slightly longer than the shortest.
//!
//! They are found by the normal search on a cluster whose devices have less memory.

use crate::control::{Control, Stopped};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::effort::passes;
use crate::planner::hybrid::{
    evaluate::{
        candidate_plan::CandidatePlan,
        plan_cost::{EvaluatedPlan, PlanEvaluator},
    },
    plan_without_last_search,
    settings::Settings,
};

/// The plan with the smallest maximum memory per device that the searches found.
#[derive(Debug, Clone, Default)]
pub struct MinMemoryPlan {
    /// Plan, evaluated with the real memory of the devices. `None` if no plan with less memory was found.
    pub plan: Option<(CandidatePlan, EvaluatedPlan)>,
    /// Reason of an early end: a deadline or an interrupt.
    pub stopped: Option<Stopped>,
}

/// Finds a plan with a step of at most `limit_s` that needs less than `enough_bytes` on each device.
///
/// # Errors
/// Returns [`Error::Argument`] or [`Error::Cluster`] for invalid input.
pub fn min_memory(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    limit_s: f64,
    enough_bytes: f64,
    control: &Control,
) -> Result<MinMemoryPlan> {
    let mut found = MinMemoryPlan::default();
    let (mut too_little, mut enough) = (0.0, enough_bytes);
    // Bisection over the memory limit. Below `too_little` no plan met the step limit, and `enough` is what the best
    // plan so far needs. Each round is a whole search, so rounds are few and the tolerance is coarse.
    for _ in 0..passes::MEMORY_ROUNDS {
        if enough - too_little <= passes::MEMORY_TOLERANCE * enough {
            break;
        }
        found.stopped = control.stopped();
        if found.stopped.is_some() {
            break;
        }
        let middle = f64::midpoint(too_little, enough);
        let mut smaller = cluster.clone();
        for node in &mut smaller.nodes {
            node.memory_bytes = node.memory_bytes.min(middle + settings.memory.reserved_bytes);
        }
        let answer = match plan_without_last_search(model, &smaller, settings, control) {
            Ok(answer) => answer,
            // A limit that no plan fits is a lower end of the bisection, not an error.
            Err(Error::Infeasible { .. }) => {
                too_little = middle;
                continue;
            }
            Err(Error::TimedOut { .. } | Error::Cancelled) => {
                found.stopped = control.stopped();
                break;
            }
            Err(error) => return Err(error),
        };
        if answer.evaluated.step_s <= limit_s {
            // The search saw smaller devices, so evaluate the plan on the real ones. Its memory is below the limit
            // tried, which makes the bisection converge faster than halving.
            let evaluated = PlanEvaluator::new(model, cluster, settings).evaluate(&answer.plan)?;
            enough = evaluated.stages.iter().map(|stage| stage.memory.total_bytes()).fold(0.0, f64::max);
            found.plan = Some((answer.plan, evaluated));
        } else {
            too_little = middle;
        }
        // A search that ended by its work limit has still answered, so the bisection goes on.
        found.stopped = answer.stopped.filter(|&stopped| stopped != Stopped::Effort);
        if found.stopped.is_some() {
            break;
        }
    }
    Ok(found)
}
