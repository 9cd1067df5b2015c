//! The result of a search: a plan and its bounds, or the reason why there is none.

use super::Search;
use crate::control::Stopped;
use crate::error::{Error, Result};
use crate::planner::hybrid::evaluate::{self, candidate_plan::CandidatePlan, plan_cost::EvaluatedPlan};

/// Message if it is certain that no plan fits. Python code compares it, so keep both in step.
const NO_PLAN_FITS: &str = "no plan fits";
const MORE_MEMORY: &str = "use more devices, or devices with more memory";

/// Returns the error for problems where certainly no plan fits.
#[must_use]
pub fn no_plan_fits() -> Error {
    Error::infeasible(NO_PLAN_FITS, MORE_MEMORY)
}

/// Result of a search.
#[derive(Debug, Clone)]
pub struct SearchResult {
    /// Plan with the shortest simulated step that was found.
    pub plan: CandidatePlan,
    /// Costs of the plan.
    pub evaluated: EvaluatedPlan,
    /// Lower bound on the step of every plan, with any cuts and any placement.
    pub lower_bound_s: f64,
    /// Lower bound for plans with the model's cuts. `None` if these are all cuts.
    pub searched_cuts_bound_s: Option<f64>,
    /// Lower bound for node-aligned plans with the model's cuts. `None` if all placements were searched.
    pub node_aligned_bound_s: Option<f64>,
    /// Reason of the end of the search if better plans may be left, else `None`.
    pub stopped: Option<Stopped>,
    /// Labels that were explored.
    pub labels: u64,
    /// Plans that were simulated.
    pub simulated: u64,
}

impl Search<'_> {
    /// Ends the search and returns its result, or the error that explains why there is no plan.
    pub(crate) fn answer(mut self) -> Result<SearchResult> {
        // Plans that differ only in the numbering of equal nodes are shown as the same plan.
        if let Some((step_s, plan)) = &mut self.best {
            let ordered = self.evaluator.in_order(plan);
            // A different order of equal nodes adds the same times in another order, which may round up. Keep the
            // original plan then.
            let ordered_s = self.evaluator.evaluate(&ordered)?.step_s;
            if ordered_s <= *step_s {
                (*step_s, *plan) = (ordered_s, ordered);
            }
        }
        let of_cuts_s = self.lower_bound_s();
        let lower_bound_s = of_cuts_s.min(self.all_cuts_bound_s);
        let searched_cuts_bound_s = (!self.model.has_all_cuts).then_some(of_cuts_s);
        let node_aligned_bound_s = (!self.is_exact()).then(|| self.searched_bound_s());
        let stopped = self.stopped();
        let Some((step_s, mut plan)) = self.best else {
            return Err(if self.control.should_stop() {
                self.control.error()
            } else {
                // An infinite bound means that every size was refuted. A bound of 0 carries no information.
                let what = match lower_bound_s {
                    f64::INFINITY => NO_PLAN_FITS.to_owned(),
                    0.0 => "no plan was found that fits".to_owned(),
                    bound_s => format!("no plan was found that fits, and none takes less than {}", seconds(bound_s)),
                };
                Error::infeasible(what, MORE_MEMORY)
            });
        };
        // `hpgo.evaluate` would choose numbers in flight and a micro-batch size for these stages. Try its choice, so
        // that evaluating the stages of a plan never gives a shorter step than the plan.
        if !self.control.should_stop() {
            let other = evaluate::fastest(&mut self.evaluator, &plan.stages, self.control)?;
            if self.evaluator.evaluate(&other)?.step_s < step_s {
                plan = other;
            }
        }
        let evaluated = self.evaluator.evaluate(&plan)?;
        // This bound is about node-aligned placements only. Annealing tries all others too, so the plan may be on one
        // of them, with a shorter step than any node-aligned plan. A bound above the step would then say that the plan
        // cannot exist. At the step it remains true: no node-aligned plan is shorter.
        let node_aligned_bound_s = node_aligned_bound_s.map(|bound_s| bound_s.min(evaluated.step_s));
        Ok(SearchResult {
            lower_bound_s,
            searched_cuts_bound_s,
            evaluated,
            plan,
            node_aligned_bound_s,
            stopped,
            labels: self.labels + self.relaxed_labels,
            simulated: self.evaluator.simulated,
        })
    }
}

/// Formats a time for a message, with four significant digits.
fn seconds(time_s: f64) -> String {
    let (scale, unit) =
        [(1.0, "s"), (1e3, "ms")].into_iter().find(|(scale, _)| time_s * scale >= 1.0).unwrap_or((1e6, "us"));
    #[allow(clippy::cast_sign_loss)] // clamped
    let digits = (3.0 - (time_s * scale).log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{:.digits$} {unit}", time_s * scale)
}
