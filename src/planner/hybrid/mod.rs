//! Chooses stages, replicas, devices and micro-batches for training, and bounds how much better any other plan could
//! be.
//!
//! ```text
//! patterns, packing ─▶ first plans ─▶ annealing, narrow passes ─▶ good plans
//!                      ─▶ complete passes under rising thresholds ─▶ bound
//!                      ─▶ last search around the best plan, while a gap remains
//! (each pass: paths of all micro-batch sizes ─▶ plans ─▶ simulate, improve)
//! ```
//!
//! No plan of the search space has a shorter step than the bound. The best simulated plan is the answer, and the
//! relative distance between its step and the bound is the gap. All files here use these terms:
//!
//! - *cut*: a place in the model where one stage ends and the next one begins.
//! - *path*: a chain of actions of the schedule that run one after another. The longest path of a plan is a lower bound
//!   on its step, and takes much less time to find than a simulation.
//! - *label*: the stages behind some cut, with their devices. The search builds plans from the last stage to the first.
//! - *pass*: one run of the search over all micro-batch sizes. It extends labels stage by stage, and drops those that
//!   no stages in front can complete to a step below the *threshold*. A narrow pass is a beam search. A complete pass
//!   drops no label that could become a better plan, so it proves a bound.
//! - *pattern*: a regular list of devices, such as node after node, of which stages take consecutive ones. *Packing*
//!   puts stages on as few devices as hold them instead.
//! - *node-aligned* placement: each stage is inside one node or takes whole nodes, with few exceptions
//!   (docs/planner.md). If a cluster has too many placements, passes search these only.
//! - *relaxed space*: stages with numbers of devices, but without the devices themselves. It bounds all placements.
//!
//! The folders, in the order of reading:
//!
//! - `evaluate`: costs of a plan. Every plan is evaluated there.
//! - `bounds`: lower bounds on the steps of all plans, with one file for each lemma of docs/proofs.md.
//! - `placement`: devices that stages may take, and plans by pattern.
//! - `search`: label search, annealing and local search, which find plans.

mod baselines;
mod bounds;
mod evaluate;
mod exhaustive;
mod memory_preference;
mod placement;
mod search;
mod settings;
mod subproblem;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::Result;
use crate::planner::effort::{ALL_WORK, QUICK, WHOLE, annealing, passes};

pub use baselines::{PipelineOnly, closest, closest_in_short, data_parallel, fitting, helpful_changes, pipeline_only};
pub use bounds::all_cuts::min_step_s as min_step_of_all_cuts_s;
pub use bounds::any_order::{AnyOrder, AnyOrderBound, Row, min_step_of_any_order_s};
pub use bounds::bound_bisection::min_step_s as min_step_of_all_s;
pub use bounds::memory::{Schedules, nothing_fits, nothing_fits_with_any_cuts};
pub use evaluate::candidate_plan::{CandidatePlan, StageCandidate};
pub use evaluate::plan_cost::{EvaluatedPlan, PlanEvaluator};
pub use evaluate::stage_cost::StageCost;
pub use evaluate::{evaluate, evaluate_in_flight, improve_stages};
pub use exhaustive::{Exhausted, exhaustive, exhaustive_within};
pub use memory_preference::{MinMemoryPlan, min_memory};
pub use search::initial_plans::draft;
pub use search::result::{SearchResult, no_plan_fits};
pub use settings::{Recompute, Settings, WarmUp};

use search::Search;

/// Finds the plan with the shortest simulated step.
///
/// # Errors
/// Returns [`crate::Error::Argument`] or [`crate::Error::Cluster`] for invalid input, [`crate::Error::Infeasible`]
/// if no plan fits the devices' memory, or none was found with reasonable effort, [`crate::Error::TimedOut`] or
/// [`crate::Error::Cancelled`] if it was stopped before there was any plan.
pub fn plan(model: &LayerSums, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<SearchResult> {
    let mut search = searched(model, cluster, settings, control)?;
    search.search_around_best()?;
    search.answer()
}

/// Finds a plan like [`plan`], but without the last search. Its stages are the start of a search for another schedule,
/// for which the last percent under this schedule does not matter.
///
/// # Errors
/// Returns the errors of [`plan`].
pub fn plan_without_last_search(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    control: &Control,
) -> Result<SearchResult> {
    searched(model, cluster, settings, control)?.answer()
}

/// Returns a search after all steps of [`plan`] that also raise the bound, and the annealing of a plan far above it.
fn searched<'a>(
    model: &'a LayerSums,
    cluster: &'a Cluster,
    settings: &'a Settings,
    control: &'a Control,
) -> Result<Search<'a>> {
    settings.check()?;
    cluster.check()?;
    // Necessary conditions on memory take milliseconds and spare most infeasible problems the search.
    if nothing_fits(model, cluster, settings, Schedules::OF_SETTINGS, control)? {
        return Err(no_plan_fits());
    }
    let mut search = Search::new(model, cluster, settings, WHOLE, control);
    // Searches for baselines share `control`. Only this one reports its progress there.
    search.is_watched = true;
    // Plans come before proofs: a search that knows a good plan drops nearly every other label at once.
    search.try_patterns()?;
    if search.best.is_none() {
        // No pattern fits. Packed plans may, since each of their stages takes as many devices as it needs.
        search.start()?;
    }
    search.bound();
    // Exact means that the search space has every placement. Otherwise it has the node-aligned ones.
    if search.is_exact() {
        search_all_placements(&mut search)?;
    } else {
        search_node_aligned_placements(&mut search)?;
    }
    search.prove()?;
    search.sharpen()?;
    // This annealing comes last, so that it takes no work from the bound. It may take twice all work so far, because a
    // step far above the bound is worth a long search.
    if search.is_far() && !control.should_stop() {
        search.anneal(annealing::LAST.within(2 * search.spent()))?;
    }
    Ok(search)
}

/// Searches a space with every placement, before [`plan`] proves the bound with the whole budget.
///
/// Narrow passes find good plans, and complete passes raise the bound within a small budget. If a gap remains,
/// annealing looks for better plans, and tables of finer resolution than the tables of passes raise the bound.
fn search_all_placements(search: &mut Search<'_>) -> Result<()> {
    // A plan near the optimum spares the passes that would have to look for one, and a pass up to its step proves most
    // small problems. So a very short annealing comes before everything else.
    search.effort = QUICK;
    if search.step_s() > passes::NEEDS_ANNEALING * search.searched_bound_s() && !search.control.should_stop() {
        search.anneal(annealing::SPARK)?;
    }
    if search.best.is_none() {
        search.reach()?;
    }
    search.pass(search.step_s(), passes::BEAMS[0])?;
    search.prove()?;
    if !search.is_near() {
        search.anneal(annealing::LONG)?;
        // With every placement in the search space there is no relaxed space, so this uses tables alone.
        search.bound_all(QUICK.within(search.left()).relaxed(true));
    }
    search.effort = WHOLE.within(search.work + search.left());
    Ok(())
}

/// Searches a space with node-aligned placements only, before [`plan`] proves the bound on these.
///
/// Annealing finds plans on any placement, and the relaxed space bounds all placements. The shortest plans of the
/// relaxed space get devices by pattern and are simulated, since the bound alone does not show that they exist.
fn search_node_aligned_placements(search: &mut Search<'_>) -> Result<()> {
    // The better the plan, the lower the thresholds up to which the bound has to be raised.
    if !search.is_near() {
        search.anneal(annealing::BRIEF)?;
    }
    search.bound_all(QUICK.relaxed(false));
    if !search.is_near() {
        search.anneal(annealing::LONG)?;
        search.place_relaxed_plans()?;
        // The bound on all placements gets at most half of the work, so that the passes over node-aligned placements,
        // which follow in `prove`, keep the other half.
        search.bound_all(WHOLE.within(ALL_WORK / 2).within(search.left()).relaxed(true));
        search.place_relaxed_plans()?;
    }
    search.effort = WHOLE.node_aligned().within(search.left());
    if search.best.is_none() {
        search.effort = WHOLE;
        search.reach()?;
    }
    Ok(())
}
