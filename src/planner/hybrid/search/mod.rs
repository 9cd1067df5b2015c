//! The state of a search over all micro-batch sizes: the best plan, the bounds, and the work so far.
//!
//! The modules here find plans. `initial_plans` makes plans by pattern and anneals them (`annealing`) before anything
//! is proved. `passes` runs the label search (`suffix_search`, `labels`) under rising thresholds, which finds plans and
//! raises the bound with each pass that ends. `local_search` improves a good plan by single layers and devices, and
//! `last_search` anneals the best plan at the end while a gap remains.

pub(crate) mod annealing;
pub(crate) mod initial_plans;
pub(crate) mod labels;
mod last_search;
pub(crate) mod local_search;
mod passes;
pub(crate) mod result;
pub(crate) mod stages_by_end;
pub(crate) mod suffix_search;
pub(crate) mod unscheduled_plan;

use rayon::prelude::*;
use rustc_hash::FxHashSet;

use crate::control::{Control, Progress, Stopped};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::planner::effort::{self, WorkBudget, passes as limits, work};
use crate::planner::hybrid::{
    bounds::{
        all_cuts,
        bound_bisection::{self, BoundProgress},
        prefix,
    },
    evaluate::{candidate_plan::CandidatePlan, plan_cost::PlanEvaluator},
    search::{suffix_search::SuffixSearch, unscheduled_plan::UnscheduledPlan},
    settings::Settings,
    subproblem::Subproblem,
};

/// Search state of one micro-batch size.
pub(crate) struct SizeSearch<'a> {
    pub suffixes: SuffixSearch<'a>,
    /// Lower bound on the step of plans in the search space.
    pub bound_s: f64,
    /// Threshold below which passes have found all plans: no further pass finds a plan with shorter paths than this.
    pub searched_s: f64,
    /// Bound over all placements, if the search space has only some of them.
    pub of_all: BoundProgress,
}

/// Returns for each size a lower bound on its step and the work spent on it. Bounds are cut off at `step_s`, because a
/// higher bound proves nothing more.
pub(crate) fn min_steps_s(sizes: &[SizeSearch<'_>], step_s: f64, control: &Control) -> Vec<(f64, u64)> {
    let min = sizes.par_iter().map(|size| {
        if size.bound_s >= step_s {
            return (size.bound_s, 0);
        }
        let (min_s, work) = prefix::min_step_s(&size.suffixes.task, size.suffixes.links(true), step_s, control);
        (min_s.max(size.bound_s), work)
    });
    min.collect()
}

/// A search over all micro-batch sizes.
#[expect(clippy::struct_excessive_bools, reason = "they are independent facts about the search")]
pub(crate) struct Search<'a> {
    model: &'a LayerSums,
    pub effort: WorkBudget,
    pub control: &'a Control,
    sizes: Vec<SizeSearch<'a>>,
    pub evaluator: PlanEvaluator<'a>,
    /// The best plan so far, with its simulated step.
    pub best: Option<(f64, CandidatePlan)>,
    /// Pattern plans that annealing starts from.
    pattern_plans: Vec<UnscheduledPlan>,
    /// Whether `pattern_plans` includes patterns with a longer step than the best plan.
    has_wide_patterns: bool,
    /// Whether the cuts of `pattern_plans` have been optimized.
    is_settled: bool,
    /// Plans of passes that have been simulated.
    seen: FxHashSet<CandidatePlan>,
    labels: u64,
    /// Work of all label passes.
    pub work: u64,
    /// Labels of relaxed passes, their work, and the work of annealing.
    relaxed_labels: u64,
    relaxed_work: u64,
    annealed_work: u64,
    /// Whether `control` stopped the last search, after all passes.
    is_cut_short: bool,
    /// Whether this search reports its progress to `control`.
    pub is_watched: bool,
    /// Lower bound on the step of plans with any cuts. Infinite where the model has all cuts.
    all_cuts_bound_s: f64,
}

// The methods keep one invariant: `bound_s` of a size never exceeds the step of any plan of that size.
impl<'a> Search<'a> {
    pub(crate) fn new(
        model: &'a LayerSums,
        cluster: &'a Cluster,
        settings: &'a Settings,
        effort: WorkBudget,
        control: &'a Control,
    ) -> Self {
        let sizes: Vec<SizeSearch<'_>> = (Subproblem::all(model, cluster, settings).into_par_iter())
            .map(|task| SizeSearch {
                bound_s: 0.0,
                searched_s: 0.0,
                of_all: BoundProgress::default(),
                suffixes: SuffixSearch::new(task),
            })
            .collect();
        // If the model has all cuts, the bounds of the sizes already hold for every plan, and no other bound is needed.
        let of_all_cuts = sizes.iter().map(|size| all_cuts::min_step_of_size_s(&size.suffixes.task));
        let all_cuts_bound_s =
            if model.has_all_cuts { f64::INFINITY } else { of_all_cuts.fold(f64::INFINITY, f64::min) };
        let evaluator = PlanEvaluator::new(model, cluster, settings);
        let (best, seen) = (None, FxHashSet::default());
        Self {
            model,
            effort,
            control,
            sizes,
            evaluator,
            best,
            pattern_plans: Vec::new(),
            has_wide_patterns: false,
            is_settled: false,
            seen,
            labels: 0,
            work: 0,
            relaxed_labels: 0,
            relaxed_work: 0,
            annealed_work: 0,
            is_cut_short: false,
            is_watched: false,
            all_cuts_bound_s,
        }
    }

    /// Finds a first bound for every size whose bound is below the step.
    pub(crate) fn bound(&mut self) {
        let bounds = min_steps_s(&self.sizes, self.step_s(), self.control);
        // `take_bounds` borrows the whole search, so the sizes are taken out of it for the call.
        let mut sizes = std::mem::take(&mut self.sizes);
        self.take_bounds(&mut sizes, &bounds);
        self.sizes = sizes;
    }

    /// Stores bounds of sizes, and adds their work.
    pub(crate) fn take_bounds(&mut self, sizes: &mut [SizeSearch<'_>], bounds: &[(f64, u64)]) {
        for (size, (bound_s, work)) in sizes.iter_mut().zip(bounds) {
            // Above the best step a bound has no meaning: at the step, optimality is proved already.
            size.bound_s = bound_s.min(self.step_s());
            size.of_all.bound_s = size.bound_s;
            self.relaxed_work += work;
        }
    }

    /// Raises the bounds over all placements.
    pub(crate) fn bound_all(&mut self, effort: WorkBudget) {
        let (control, step_s) = (self.control, self.step_s());
        for size in &mut self.sizes {
            // Where every placement is in the search space, its bound needs no relaxation.
            if size.suffixes.exact_placement() {
                size.of_all.bound_s = size.bound_s;
            }
        }
        let mut sizes: Vec<(&mut SuffixSearch<'_>, &mut BoundProgress)> =
            self.sizes.iter_mut().map(|size| (&mut size.suffixes, &mut size.of_all)).collect();
        let spent = bound_bisection::raise(&mut sizes, step_s, effort, control);
        self.relaxed_labels += spent.labels;
        self.relaxed_work += spent.work;
        for size in &mut self.sizes {
            size.bound_s = size.bound_s.max(size.of_all.bound_s);
        }
    }

    /// Returns the work that is left of [`effort::ALL_WORK`].
    pub(crate) fn left(&self) -> u64 {
        effort::ALL_WORK.saturating_sub(self.spent())
    }

    /// Returns all work so far.
    pub(crate) fn spent(&self) -> u64 {
        self.work + self.relaxed_work + self.annealed_work + work::ACTION * self.evaluator.actions
    }

    pub(crate) fn step_s(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(step_s, _)| *step_s)
    }

    /// Returns a lower bound on the step of every plan of the search space.
    pub(crate) fn searched_bound_s(&self) -> f64 {
        self.sizes.iter().map(|size| size.bound_s).fold(self.step_s(), f64::min)
    }

    /// Returns a lower bound on the step of every plan with the model's cuts, on any placement.
    pub(crate) fn lower_bound_s(&self) -> f64 {
        if self.is_exact() {
            return self.searched_bound_s();
        }
        self.sizes.iter().map(|size| size.of_all.bound_s).fold(self.step_s(), f64::min)
    }

    /// Returns whether the search space has every placement.
    pub(crate) fn is_exact(&self) -> bool {
        self.sizes.iter().all(|size| size.suffixes.exact_placement())
    }

    /// Returns whether no pass can raise a bound.
    pub(crate) fn is_proved(&self) -> bool {
        // A pass that searched up to the step has found every plan below it. The rest of the gap comes from rounding,
        // which only a finer grid can close.
        let step_s = self.step_s();
        self.sizes.iter().all(|size| size.bound_s >= step_s || size.searched_s >= step_s)
    }

    /// Returns whether the search was stopped or has reached its limits.
    pub(crate) fn must_end(&self) -> bool {
        self.control.should_stop() || self.labels >= self.effort.labels || self.work >= self.effort.work
    }

    /// Returns why the search ended, if better plans may be left.
    pub(crate) fn stopped(&self) -> Option<Stopped> {
        // Annealing at the end may still shorten a step that is far above the bound, even if no pass can raise the
        // bound.
        let is_cut_short = self.is_cut_short || (self.is_far() && self.control.should_stop()); // however much is proved
        (is_cut_short || !self.is_proved()).then(|| self.control.stopped().unwrap_or(Stopped::Effort))
    }

    /// Returns whether the best plan is worth a long annealing after the last pass.
    pub(crate) fn is_far(&self) -> bool {
        self.step_s() > limits::FAR * self.lower_bound_s()
    }

    /// Returns whether the best plan is near the bound, or the search was stopped.
    pub(crate) fn is_near(&self) -> bool {
        self.step_s() <= limits::NEAR * self.lower_bound_s() || self.control.should_stop()
    }

    /// Reports the best step and the bound, if the search is watched.
    pub(crate) fn report(&self) {
        if self.is_watched {
            self.control.report(Progress {
                best_s: self.step_s(),
                lower_bound_s: self.all_cuts_bound_s.min(self.lower_bound_s()),
            });
        }
    }
}
