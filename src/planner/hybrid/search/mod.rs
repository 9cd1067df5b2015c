//! The state of a search over all micro-batch sizes: the best plan, the bounds, and the work so far.
//!
//! The modules here find plans. `passes` runs the label search (`suffix_search`, `labels`) under rising thresholds. It finds
//! plans, and raises the bound with each pass that ends. `initial_plans` takes patterns and anneals them (`annealing`) before
//! anything is proved. `local_search` changes a good plan by single layers and devices.

pub(crate) mod annealing;
pub(crate) mod initial_plans;
pub(crate) mod labels;
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
        bound_bisection::{self, Known},
        prefix,
    },
    evaluate::{candidate_plan::CandidatePlan, plan_cost::PlanEvaluator},
    search::{suffix_search::SuffixSearch, unscheduled_plan::UnscheduledPlan},
    settings::Settings,
    subproblem::Subproblem,
};

/// The search for one micro-batch size.
pub(crate) struct SizeSearch<'a> {
    pub suffixes: SuffixSearch<'a>,
    /// None of its plans has a shorter step.
    pub bound_s: f64,
    /// Up to this length of paths, no pass will find more.
    pub searched_s: f64,
    /// The same for all placements, where the search space has not all of them.
    pub of_all: Known,
}

/// For each size a step that none of its plans is shorter than, if it is below `step_s`; what finding that took, in
/// nanoseconds or so.
pub(crate) fn least_steps_s(sizes: &[SizeSearch<'_>], step_s: f64, control: &Control) -> Vec<(f64, u64)> {
    let least = sizes.par_iter().map(|size| {
        if size.bound_s >= step_s {
            return (size.bound_s, 0);
        }
        let (least_s, work) = prefix::least_step_s(&size.suffixes.task, size.suffixes.links(true), step_s, control);
        (least_s.max(size.bound_s), work)
    });
    least.collect()
}

pub(crate) struct Search<'a> {
    model: &'a LayerSums,
    pub effort: WorkBudget,
    control: &'a Control,
    sizes: Vec<SizeSearch<'a>>,
    pub pricer: PlanEvaluator<'a>,
    pub best: Option<(f64, CandidatePlan)>,
    /// Patterns that annealing sets out from.
    drawn: Vec<UnscheduledPlan>,
    /// Whether these are more than those of a first look.
    is_drawn_wide: bool,
    /// Whether their cuts were moved where that helps.
    is_settled: bool,
    /// Plans that were simulated as a pass found them.
    seen: FxHashSet<CandidatePlan>,
    labels: u64,
    /// What passes took, in nanoseconds or so.
    pub work: u64,
    /// Labels of the relaxed space, and what passes over it took; the same of annealing.
    relaxed_labels: u64,
    relaxed_work: u64,
    annealed_work: u64,
    /// Whether whoever watches `control` wants to hear of this search.
    pub is_watched: bool,
    /// No plan has a shorter step, also with other cuts than the model's. Infinite where the model has all cuts.
    all_cuts_bound_s: f64,
}

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
                of_all: Known::default(),
                suffixes: SuffixSearch::new(task),
            })
            .collect();
        let of_all_cuts = sizes.iter().map(|size| all_cuts::least_step_of_size_s(&size.suffixes.task));
        let all_cuts_bound_s =
            if model.has_all_cuts { f64::INFINITY } else { of_all_cuts.fold(f64::INFINITY, f64::min) };
        let pricer = PlanEvaluator::new(model, cluster, settings);
        let (best, seen) = (None, FxHashSet::default());
        Self {
            model,
            effort,
            control,
            sizes,
            pricer,
            best,
            drawn: Vec::new(),
            is_drawn_wide: false,
            is_settled: false,
            seen,
            labels: 0,
            work: 0,
            relaxed_labels: 0,
            relaxed_work: 0,
            annealed_work: 0,
            is_watched: false,
            all_cuts_bound_s,
        }
    }

    /// A first bound for every size that has none yet, or a low one.
    pub(crate) fn bound(&mut self) {
        let bounds = least_steps_s(&self.sizes, self.step_s(), self.control);
        let mut sizes = std::mem::take(&mut self.sizes);
        self.take_bounds(&mut sizes, &bounds);
        self.sizes = sizes;
    }

    /// Keeps bounds of sizes, and what they took, if there are any.
    pub(crate) fn take_bounds(&mut self, sizes: &mut [SizeSearch<'_>], bounds: &[(f64, u64)]) {
        for (size, (bound_s, work)) in sizes.iter_mut().zip(bounds) {
            size.bound_s = bound_s.min(self.step_s());
            size.of_all.bound_s = size.bound_s;
            self.relaxed_work += work;
        }
    }

    /// Bounds all placements, where the search space has not all of them, or as far as tables do.
    pub(crate) fn bound_all(&mut self, effort: WorkBudget) {
        let (control, step_s) = (self.control, self.step_s());
        for size in &mut self.sizes {
            if size.suffixes.exact_placement() {
                size.of_all.bound_s = size.bound_s;
            }
        }
        let mut sizes: Vec<(&mut SuffixSearch<'_>, &mut Known)> =
            self.sizes.iter_mut().map(|size| (&mut size.suffixes, &mut size.of_all)).collect();
        let spent = bound_bisection::raise(&mut sizes, step_s, effort, control);
        self.relaxed_labels += spent.labels;
        self.relaxed_work += spent.work;
        for size in &mut self.sizes {
            size.bound_s = size.bound_s.max(size.of_all.bound_s);
        }
    }

    /// What is left of all work for passes.
    pub(crate) fn left(&self) -> u64 {
        effort::ALL_WORK.saturating_sub(self.spent())
    }

    /// All work so far, in nanoseconds or so.
    pub(crate) fn spent(&self) -> u64 {
        self.work + self.relaxed_work + self.annealed_work + work::ACTION * self.pricer.actions
    }

    pub(crate) fn step_s(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(step_s, _)| *step_s)
    }

    /// No plan of the search space has a shorter step.
    pub(crate) fn searched_bound_s(&self) -> f64 {
        self.sizes.iter().map(|size| size.bound_s).fold(self.step_s(), f64::min)
    }

    /// No plan with the model's cuts has a shorter step, wherever its stages lie.
    pub(crate) fn lower_bound_s(&self) -> f64 {
        if self.is_exact() {
            return self.searched_bound_s();
        }
        self.sizes.iter().map(|size| size.of_all.bound_s).fold(self.step_s(), f64::min)
    }

    /// Whether the search space has every placement.
    pub(crate) fn is_exact(&self) -> bool {
        self.sizes.iter().all(|size| size.suffixes.exact_placement())
    }

    /// Whether more searching can raise no bound.
    pub(crate) fn is_proved(&self) -> bool {
        let step_s = self.step_s();
        self.sizes.iter().all(|size| size.bound_s >= step_s || size.searched_s >= step_s)
    }

    /// Whether somebody asked to stop, or more would be unreasonable.
    pub(crate) fn must_end(&self) -> bool {
        self.control.should_stop() || self.labels >= self.effort.labels || self.work >= self.effort.work
    }

    /// Why the search ended, if better plans may be left.
    pub(crate) fn stopped(&self) -> Option<Stopped> {
        let is_cut_short = self.is_far() && self.control.should_stop(); // however much is proved
        (is_cut_short || !self.is_proved()).then(|| self.control.stopped().unwrap_or(Stopped::Effort))
    }

    /// Whether the best plan is worth annealing for long when all is searched.
    pub(crate) fn is_far(&self) -> bool {
        self.step_s() > limits::FAR * self.lower_bound_s()
    }

    /// Whether there is no better plan worth looking for.
    pub(crate) fn is_near(&self) -> bool {
        self.step_s() <= limits::NEAR * self.lower_bound_s() || self.control.should_stop()
    }

    /// Tells whoever watches how far the search is.
    pub(crate) fn report(&self) {
        if self.is_watched {
            self.control.report(Progress {
                best_s: self.step_s(),
                lower_bound_s: self.all_cuts_bound_s.min(self.lower_bound_s()),
            });
        }
    }
}
