//! Plans that take hardly longer than the shortest step and hold less: searches on devices that count as smaller.

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
    plan,
    settings::Settings,
};

/// The plan with the least memory on its fullest device that searches find.
#[derive(Debug, Clone, Default)]
pub struct Lean {
    /// Evaluated on the devices as they are; `None` if no plan with less memory was found.
    pub plan: Option<(CandidatePlan, EvaluatedPlan)>,
    /// Why the search ended early, if a deadline or an interrupt ended it.
    pub stopped: Option<Stopped>,
}

/// Searches for a plan whose step is at most `limit_s` and whose fullest device holds less than `enough_bytes`.
///
/// # Errors
/// [`Error::Argument`] or [`Error::Cluster`] for input that makes no sense.
pub fn min_memory(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    limit_s: f64,
    enough_bytes: f64,
    control: &Control,
) -> Result<Lean> {
    let mut lean = Lean::default();
    let (mut too_little, mut enough) = (0.0, enough_bytes);
    for _ in 0..passes::MEMORY_ROUNDS {
        if enough - too_little <= passes::MEMORY_TOLERANCE * enough {
            break;
        }
        lean.stopped = control.stopped();
        if lean.stopped.is_some() {
            break;
        }
        let middle = f64::midpoint(too_little, enough);
        let mut smaller = cluster.clone();
        for machine in &mut smaller.machines {
            machine.memory_bytes = machine.memory_bytes.min(middle + settings.memory.reserved_bytes);
        }
        let answer = match plan(model, &smaller, settings, control) {
            Ok(answer) => answer,
            Err(Error::Infeasible { .. }) => {
                too_little = middle;
                continue;
            }
            Err(Error::TimedOut { .. } | Error::Cancelled) => {
                lean.stopped = control.stopped();
                break;
            }
            Err(error) => return Err(error),
        };
        if answer.priced.step_s <= limit_s {
            let priced = PlanEvaluator::new(model, cluster, settings).price(&answer.plan)?;
            enough = priced.stages.iter().map(|stage| stage.memory.total_bytes()).fold(0.0, f64::max);
            lean.plan = Some((answer.plan, priced));
        } else {
            too_little = middle;
        }
        lean.stopped = answer.stopped.filter(|&stopped| stopped != Stopped::Effort);
        if lean.stopped.is_some() {
            break;
        }
    }
    Ok(lean)
}
