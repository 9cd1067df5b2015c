//! Chooses stages, replicas, devices and micro-batches, and proves how good the choice is.
//!
//! ```text
//! patterns, packing ─▶ first plans ─▶ annealing, narrow passes ─▶ good plans ─▶ whole passes under rising thresholds ─▶ bound
//!                                     (each pass: paths of all micro-batch sizes ─▶ plans ─▶ simulate, improve)
//! ```
//!
//! No plan of the search space has a shorter step than the bound; the best simulated plan is the answer, and how far
//! it lies above the bound is its gap.

mod all_cuts;
mod anneal;
mod bound;
mod classics;
mod clock;
mod drafts;
mod evaluate;
mod exhaustive;
mod groups;
mod improve;
mod kinds;
mod labels;
#[cfg(test)]
mod laws;
mod links;
mod memory_bound;
mod memory_preference;
mod packing;
mod paths;
mod patterns;
mod prefixes;
mod price;
mod relaxed;
mod search;
mod settings;
mod sketch;
mod slices;
mod smaller;
mod space;
mod task;
mod windows;

use rayon::prelude::*;
use rustc_hash::FxHashSet;

use crate::control::{Control, Progress, Stopped};
use crate::cost::Model;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};

pub use all_cuts::least_step_s as least_step_of_all_cuts_s;
pub use bound::least_step_s as least_step_of_all_s;
pub use classics::{Straight, closest, data_parallel, fitting, helpful_changes, straight};
pub use drafts::draft;
pub use evaluate::{evaluate, reprice};
pub use exhaustive::exhaustive;
pub use memory_bound::{Schedules, nothing_fits, nothing_fits_with_any_cuts};
pub use memory_preference::{Lean, least_memory};
pub use price::{Candidate, Priced, Pricer, StageChoice, StagePrice};
pub use settings::{Settings, WarmUp};

use bound::Known;
use packing::Packing;
use search::{EXACT_DEVICES, PassResult, Suffixes};
use sketch::Sketch;
use task::Task;

/// How far above the least conceivable step plans are looked for, pass by pass, until one is found. A pass costs little
/// while its threshold is low: nearly every label is dropped at once.
const REACH: [f64; 8] = [1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.5, f64::INFINITY];
/// No better plan is looked for above the bound by this factor, other than by the passes that raise the bound.
const NEAR: f64 = 1.01;
/// A plan that is still above the bound by this factor when all is searched is worth annealing for long.
const FAR: f64 = 1.02;
/// A first plan above the bound by this factor is worth some annealing before anything is searched.
const CLOSE: f64 = 1.03;
/// Labels of a cut that go on while plans are looked for: at first, and once there is one.
const NARROW: [usize; 2] = [50, 2_000];
/// The same for a plan that is only there to compare.
const NARROWEST: usize = 10;
/// Each pass that drops no label for being many looks at this part of what lies between its predecessor's threshold and
/// the best step, ...
const RISE: f64 = 0.3;
/// ... and at no less than this part of the step.
const LEAST_RISE: f64 = 0.02;
/// One micro-batch size may take so many times its fair part of the effort that is left, ...
const UNEVEN: u64 = 2;
/// ... and no less than so many labels, and so many nanoseconds or so.
const LEAST_LABELS: usize = 5_000;
const LEAST_WORK: u64 = 20_000_000;
/// Plans that are simulated after each pass, for each micro-batch size.
const SIMULATED: usize = 64;
/// Plans to start with that are simulated.
const FIRST: usize = 8;

/// How much work a search may be. All of its parts count what they do in the same measure: nanoseconds, or so, that one
/// processor takes for it. Counted is what was done, not time, so the answer is the same on every machine.
#[derive(Debug, Clone, Copy)]
struct Effort {
    /// Labels that are made before a question is left with the gap that it has, and nanoseconds or so of work.
    labels: u64,
    work: u64,
    /// The same for one pass over one micro-batch size: then it goes on with no more labels, and its bound says so.
    labels_of_pass: usize,
    work_of_pass: u64,
    /// Windows of a stage that a pass tells apart, and the numbers of stages behind for which its tables do.
    windows: u32,
    behind: usize,
    /// On more than [`EXACT_DEVICES`] paths are rounded down to multiples of one in so many of the least conceivable step.
    grid: f64,
    /// Whether the relaxed space tells more apart where it has no more to say.
    is_fine: bool,
    /// Plans that are simulated to improve one.
    improved: u64,
    /// Actions that are simulated after a pass, and to improve a plan.
    actions: u64,
}

/// A pipeline of thirty stages loses 0.4 % by that, and in the last pass of all a quarter as much.
const GRID: f64 = 8192.0;
const FINE_GRID: f64 = 32_768.0;
/// What a whole search may take: four and a half seconds on two processors.
const ALL: u64 = 9_000_000_000;
/// What an action of a simulation takes, in nanoseconds or so.
const ACTION: u64 = 30;
/// Passes of seconds and a quarter of a gigabyte of labels, a second of simulation.
const WHOLE: Effort = Effort {
    labels: 1_500_000,
    work: ALL,
    labels_of_pass: 1_500_000,
    work_of_pass: 4_000_000_000,
    windows: 8,
    behind: usize::MAX,
    grid: GRID,
    is_fine: false,
    improved: 2_000,
    actions: 30_000_000,
};
/// For a first look at it, after which it is clear whether better plans are worth a longer one.
const QUICK: Effort =
    Effort { labels: 300_000, work: 2_500_000_000, labels_of_pass: 300_000, work_of_pass: 1_200_000_000, ..WHOLE };
/// For compact placements, where the answer and its bound are about all.
const COMPACT: Effort =
    Effort { labels: 500_000, work: 4_500_000_000, labels_of_pass: 500_000, work_of_pass: 2_500_000_000, ..WHOLE };
/// For a plan that is only there to compare: a hundredth of a second.
const SHORT: Effort = Effort {
    labels: 50_000,
    work: 300_000_000,
    labels_of_pass: 50_000,
    work_of_pass: 300_000_000,
    windows: 2,
    behind: 1,
    grid: GRID,
    is_fine: false,
    improved: 100,
    actions: 1_000_000,
};

/// For the bound over all placements.
const RELAXED: Effort = Effort {
    labels: 3_000_000,
    work: 4_500_000_000,
    labels_of_pass: 150_000,
    work_of_pass: 600_000_000,
    windows: 8,
    behind: usize::MAX,
    grid: GRID,
    is_fine: true,
    improved: 0,
    actions: 0,
};

/// For a first look at it, and at the plans that it takes to be possible.
const LOOK: Effort = Effort { work: QUICK.work, is_fine: false, ..RELAXED };

/// For what tables alone say of the bound, where a look at it has left much open.
const TABLES: Effort = Effort { work: 2_000_000_000, ..RELAXED };

impl Effort {
    /// For each of `count` passes at once, with so much of it spent.
    fn shared_out(self, labels: u64, work: u64, count: u64) -> Self {
        let fair = |all: u64, spent: u64| UNEVEN * all.saturating_sub(spent) / count.max(1);
        Self {
            labels_of_pass: self.labels_of_pass.min((fair(self.labels, labels) as usize).max(LEAST_LABELS)),
            work_of_pass: self.work_of_pass.min(fair(self.work, work).max(LEAST_WORK)),
            ..self
        }
    }

    /// No more work than this.
    fn within(self, work: u64) -> Self {
        Self { work: self.work.min(work), ..self }
    }
}

/// The message for a question without a plan, where that is certain. Python compares it.
const NO_PLAN_FITS: &str = "no plan fits";
const MORE_MEMORY: &str = "use more devices, or devices with more memory";

/// The error for a question of which it is certain that no plan fits.
#[must_use]
pub fn no_plan_fits() -> Error {
    Error::infeasible(NO_PLAN_FITS, MORE_MEMORY)
}

/// The answer to one question.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The plan with the shortest simulated step that was found.
    pub plan: Candidate,
    /// Its price.
    pub priced: Priced,
    /// No plan of the question has a shorter step, whatever its cuts and its placement.
    pub lower_bound_s: f64,
    /// The same for plans with the model's cuts, if these are not all cuts. `None` if they are.
    pub searched_cuts_bound_s: Option<f64>,
    /// The same for plans with the model's cuts and compact placements, if only those were searched; `None` if all were.
    pub compact_bound_s: Option<f64>,
    /// Why the search ended before it had no better plan left to look for; `None` if it had none.
    pub stopped: Option<Stopped>,
    /// Suffixes that the search looked at.
    pub labels: u64,
    /// Plans that were simulated.
    pub simulated: u64,
}

/// Finds the plan with the shortest simulated step.
///
/// # Errors
/// [`Error::Argument`] or [`Error::Cluster`] for input that makes no sense, [`Error::Infeasible`] if no plan fits the
/// devices' memory, or none was found with reasonable effort, [`Error::TimedOut`] or [`Error::Cancelled`] if it was
/// stopped before there was any plan.
pub fn plan(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    settings.check()?;
    cluster.check()?;
    if nothing_fits(model, cluster, settings, Schedules::OF_SETTINGS, control)? {
        return Err(no_plan_fits());
    }
    let mut search = Search::new(model, cluster, settings, WHOLE, control);
    search.is_watched = true;
    search.draw()?;
    if search.best.is_none() {
        search.start()?;
    }
    search.bound();
    if search.is_exact() {
        search.effort = QUICK;
        if search.step_s() > CLOSE * search.searched_bound_s() && !control.should_stop() {
            search.anneal(drafts::SPARK)?;
        }
        if search.best.is_none() {
            search.reach()?;
        }
        search.pass(search.step_s(), NARROW[0])?;
        search.prove()?;
        if !search.is_near() {
            search.anneal(drafts::LONG)?;
            search.bound_all(TABLES.within(search.left()));
        }
        search.effort = WHOLE.within(search.work + search.left());
    } else {
        if !search.is_near() {
            search.anneal(drafts::BRIEF)?;
        }
        search.bound_all(LOOK);
        if !search.is_near() {
            search.anneal(drafts::LONG)?;
            search.realise()?;
            search.bound_all(RELAXED.within(search.left()));
            search.realise()?;
        }
        search.effort = COMPACT.within(search.left());
        if search.best.is_none() {
            search.effort = WHOLE;
            search.reach()?;
        }
    }
    search.prove()?;
    search.sharpen()?;
    if search.is_far() && !control.should_stop() {
        search.anneal(drafts::LAST.within(2 * search.spent()))?;
    }
    search.answer()
}

/// The search for one micro-batch size.
struct SizeSearch<'a> {
    suffixes: Suffixes<'a>,
    /// None of its plans has a shorter step.
    bound_s: f64,
    /// Up to this length of paths, no pass will find more.
    searched_s: f64,
    /// The same for all placements, where the search space has not all of them.
    of_all: Known,
}

/// For each size a step that none of its plans is shorter than, if it is below `step_s`; what finding that took, in
/// nanoseconds or so.
fn least_steps_s(sizes: &[SizeSearch<'_>], step_s: f64, control: &Control) -> Vec<(f64, u64)> {
    let least = sizes.par_iter().map(|size| {
        if size.bound_s >= step_s {
            return (size.bound_s, 0);
        }
        let (least_s, work) = prefixes::least_step_s(&size.suffixes.task, size.suffixes.links(true), step_s, control);
        (least_s.max(size.bound_s), work)
    });
    least.collect()
}

struct Search<'a> {
    model: &'a Model,
    effort: Effort,
    control: &'a Control,
    sizes: Vec<SizeSearch<'a>>,
    pricer: Pricer<'a>,
    best: Option<(f64, Candidate)>,
    /// Patterns that annealing sets out from.
    drawn: Vec<Sketch>,
    /// Whether these are more than those of a first look.
    is_drawn_wide: bool,
    /// Whether their cuts were moved where that helps.
    is_settled: bool,
    /// Plans that were simulated as a pass found them.
    seen: FxHashSet<Candidate>,
    labels: u64,
    /// What passes took, in nanoseconds or so.
    work: u64,
    /// Labels of the relaxed space, and what passes over it took; the same of annealing.
    relaxed_labels: u64,
    relaxed_work: u64,
    annealed_work: u64,
    /// Whether whoever watches `control` wants to hear of this search.
    is_watched: bool,
    /// No plan has a shorter step, also with other cuts than the model's. Infinite where the model has all cuts.
    all_cuts_bound_s: f64,
}

impl<'a> Search<'a> {
    fn new(
        model: &'a Model,
        cluster: &'a Cluster,
        settings: &'a Settings,
        effort: Effort,
        control: &'a Control,
    ) -> Self {
        let sizes: Vec<SizeSearch<'_>> = (Task::all(model, cluster, settings).into_par_iter())
            .map(|task| SizeSearch {
                bound_s: 0.0,
                searched_s: 0.0,
                of_all: Known::default(),
                suffixes: Suffixes::new(task),
            })
            .collect();
        let of_all_cuts = sizes.iter().map(|size| all_cuts::least_step_of_size_s(&size.suffixes.task));
        let all_cuts_bound_s =
            if model.has_all_cuts { f64::INFINITY } else { of_all_cuts.fold(f64::INFINITY, f64::min) };
        let pricer = Pricer::new(model, cluster, settings);
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

    /// A first plan, if one is easily made.
    fn start(&mut self) -> Result<()> {
        let control = self.control;
        let packed: Vec<Vec<Candidate>> =
            (self.sizes.par_iter()).map(|size| Packing::new(&size.suffixes.task).plans(control)).collect();
        let mut plans = Vec::new();
        for plan in packed.into_iter().flatten() {
            plans.extend(self.with_windows(&plan)?);
        }
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        plans.truncate(FIRST);
        self.simulate(plans, self.effort.actions)
    }

    /// A first bound for every size that has none yet, or a low one.
    fn bound(&mut self) {
        let bounds = least_steps_s(&self.sizes, self.step_s(), self.control);
        let mut sizes = std::mem::take(&mut self.sizes);
        self.take_bounds(&mut sizes, &bounds);
        self.sizes = sizes;
    }

    /// Keeps bounds of sizes, and what they took, if there are any.
    fn take_bounds(&mut self, sizes: &mut [SizeSearch<'_>], bounds: &[(f64, u64)]) {
        for (size, (bound_s, work)) in sizes.iter_mut().zip(bounds) {
            size.bound_s = bound_s.min(self.step_s());
            size.of_all.bound_s = size.bound_s;
            self.relaxed_work += work;
        }
    }

    /// Bounds all placements, where the search space has not all of them, or as far as tables do.
    fn bound_all(&mut self, effort: Effort) {
        let (control, step_s) = (self.control, self.step_s());
        for size in &mut self.sizes {
            if size.suffixes.exact_placement() {
                size.of_all.bound_s = size.bound_s;
            }
        }
        let mut sizes: Vec<(&mut Suffixes<'_>, &mut Known)> =
            self.sizes.iter_mut().map(|size| (&mut size.suffixes, &mut size.of_all)).collect();
        let spent = bound::raise(&mut sizes, step_s, effort, control);
        self.relaxed_labels += spent.labels;
        self.relaxed_work += spent.work;
        for size in &mut self.sizes {
            size.bound_s = size.bound_s.max(size.of_all.bound_s);
        }
    }

    /// What is left of all work for passes.
    fn left(&self) -> u64 {
        ALL.saturating_sub(self.spent())
    }

    /// All work so far, in nanoseconds or so.
    fn spent(&self) -> u64 {
        self.work + self.relaxed_work + self.annealed_work + ACTION * self.pricer.actions
    }

    fn step_s(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(step_s, _)| *step_s)
    }

    /// No plan of the search space has a shorter step.
    fn searched_bound_s(&self) -> f64 {
        self.sizes.iter().map(|size| size.bound_s).fold(self.step_s(), f64::min)
    }

    /// No plan with the model's cuts has a shorter step, wherever its stages lie.
    fn lower_bound_s(&self) -> f64 {
        if self.is_exact() {
            return self.searched_bound_s();
        }
        self.sizes.iter().map(|size| size.of_all.bound_s).fold(self.step_s(), f64::min)
    }

    /// Whether the search space has every placement.
    fn is_exact(&self) -> bool {
        self.sizes.iter().all(|size| size.suffixes.exact_placement())
    }

    /// Whether more searching can raise no bound.
    fn is_proved(&self) -> bool {
        let step_s = self.step_s();
        self.sizes.iter().all(|size| size.bound_s >= step_s || size.searched_s >= step_s)
    }

    /// Whether somebody asked to stop, or more would be unreasonable.
    fn must_end(&self) -> bool {
        self.control.should_stop() || self.labels >= self.effort.labels || self.work >= self.effort.work
    }

    /// Why the search ended, if better plans may be left.
    fn stopped(&self) -> Option<Stopped> {
        let is_cut_short = self.is_far() && self.control.should_stop(); // however much is proved
        (is_cut_short || !self.is_proved()).then(|| self.control.stopped().unwrap_or(Stopped::Effort))
    }

    /// Whether the best plan is worth annealing for long when all is searched.
    fn is_far(&self) -> bool {
        self.step_s() > FAR * self.lower_bound_s()
    }

    /// Whether there is no better plan worth looking for.
    fn is_near(&self) -> bool {
        self.step_s() <= NEAR * self.lower_bound_s() || self.control.should_stop()
    }

    /// Looks ever farther above the least conceivable step until a plan is found, and around the best one.
    fn reach(&mut self) -> Result<()> {
        let least_s = self.searched_bound_s();
        if self.step_s() <= REACH[1] * least_s {
            return Ok(()); // the first pass of a proof finds what there is to find
        }
        for reach in REACH {
            let limit_s = (least_s * reach).min(self.step_s());
            self.pass(limit_s, NARROW[0])?;
            if self.step_s() <= limit_s || self.must_end() {
                break;
            }
        }
        Ok(())
    }

    /// Raises the bound, as far as that takes no unreasonable effort.
    fn prove(&mut self) -> Result<()> {
        if !self.is_proved() {
            self.pass(self.step_s(), NARROW[1])?;
        }
        while !(self.is_proved() || self.must_end()) {
            let step_s = self.step_s();
            let open = self.sizes.iter().filter(|size| size.bound_s.max(size.searched_s) < step_s);
            let searched_s = open.map(|size| size.searched_s.max(size.bound_s)).fold(step_s, f64::min);
            let rise_s = (RISE * (step_s - searched_s)).max(LEAST_RISE * step_s);
            // Without any plan yet there is nothing to rise to.
            let limit_s = if step_s.is_finite() { step_s.min(searched_s + rise_s) } else { step_s };
            self.pass(limit_s, usize::MAX)?;
        }
        Ok(())
    }

    /// Raises bounds that paths rounded down may keep below the step, with no more work than passes took so far.
    fn sharpen(&mut self) -> Result<()> {
        let is_rounded = self.sizes.iter().any(|size| size.suffixes.task.cluster.devices() > EXACT_DEVICES);
        let is_open = self.searched_bound_s() < self.step_s() && self.is_proved();
        if !(is_rounded && is_open) || self.must_end() {
            return Ok(());
        }
        let work_of_pass = self.effort.work_of_pass.min(self.work);
        self.effort = Effort { grid: FINE_GRID, work_of_pass, ..self.effort };
        let searched: Vec<f64> = self.sizes.iter_mut().map(|size| std::mem::take(&mut size.searched_s)).collect();
        let outcome = self.pass(self.step_s(), usize::MAX);
        for (size, searched_s) in self.sizes.iter_mut().zip(searched) {
            size.searched_s = size.searched_s.max(searched_s);
        }
        outcome
    }

    /// Looks for plans whose paths are shorter than `limit_s`, simulates the best, and improves on them.
    fn pass(&mut self, limit_s: f64, beam: usize) -> Result<()> {
        let control = self.control;
        let is_open = |size: &SizeSearch<'_>| size.bound_s < limit_s && size.searched_s < limit_s;
        let open = self.sizes.iter().filter(|size| is_open(size)).count() as u64;
        let effort = self.effort.shared_out(self.labels, self.work, open);
        let found: Vec<Option<PassResult>> = (self.sizes.par_iter_mut())
            .map(|size| {
                let is_open = is_open(size) && !control.should_stop();
                is_open.then(|| size.suffixes.pass(limit_s, beam, effort, control))
            })
            .collect();
        let mut plans = Vec::new();
        for (size, found) in self.sizes.iter_mut().zip(found) {
            let Some(found) = found else { continue };
            let shortest_s = found.plans.first().map_or(f64::INFINITY, |(path_s, _)| *path_s);
            size.bound_s = size.bound_s.max(shortest_s.min(found.bound_s).min(limit_s));
            size.searched_s = size.searched_s.max(found.bound_s.min(limit_s));
            self.labels += found.labels;
            self.work += found.work;
            plans.extend(found.plans.into_iter().take(SIMULATED));
        }
        let before_s = self.step_s();
        self.simulate(plans, effort.actions)?;
        if self.step_s() < before_s {
            self.improve();
        }
        self.report();
        Ok(())
    }

    /// Tells whoever watches how far the search is.
    fn report(&self) {
        if self.is_watched {
            self.control.report(Progress {
                best_s: self.step_s(),
                lower_bound_s: self.all_cuts_bound_s.min(self.lower_bound_s()),
            });
        }
    }

    /// Simulates plans, shortest paths first, while their paths leave hope, and no more than so many actions.
    fn simulate(&mut self, mut plans: Vec<(f64, Candidate)>, actions: u64) -> Result<()> {
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let until = self.pricer.actions + actions;
        for (path_s, plan) in plans {
            let is_late = self.control.should_stop() || self.pricer.actions >= until;
            if path_s >= self.step_s() || (self.best.is_some() && is_late) {
                break;
            }
            if !self.seen.insert(plan.clone()) {
                continue;
            }
            let priced = self.pricer.price(&plan)?;
            if priced.step_s < self.step_s() {
                self.best = Some((priced.step_s, plan));
            }
        }
        Ok(())
    }

    fn answer(mut self) -> Result<Answer> {
        if let Some((step_s, plan)) = &mut self.best {
            let ordered = self.pricer.in_order(plan);
            // Sums of the same times in another order may differ.
            let ordered_s = self.pricer.price(&ordered)?.step_s;
            if ordered_s <= *step_s {
                (*step_s, *plan) = (ordered_s, ordered);
            }
        }
        let of_cuts_s = self.lower_bound_s();
        let lower_bound_s = of_cuts_s.min(self.all_cuts_bound_s);
        let searched_cuts_bound_s = (!self.model.has_all_cuts).then_some(of_cuts_s);
        let compact_bound_s = (!self.is_exact()).then(|| self.searched_bound_s());
        let stopped = self.stopped();
        let Some((step_s, mut plan)) = self.best else {
            return Err(if self.control.should_stop() {
                self.control.error()
            } else {
                let what = match lower_bound_s {
                    f64::INFINITY => NO_PLAN_FITS.to_owned(),
                    0.0 => "no plan was found that fits".to_owned(),
                    bound_s => format!("no plan was found that fits, and none takes less than {}", seconds(bound_s)),
                };
                Error::infeasible(what, MORE_MEMORY)
            });
        };
        // What whoever prices these stages would choose for them.
        if !self.control.should_stop() {
            let other = evaluate::fastest(&mut self.pricer, &plan.stages, self.control)?;
            if self.pricer.price(&other)?.step_s < step_s {
                plan = other;
            }
        }
        let priced = self.pricer.price(&plan)?;
        // What was chosen last may be no compact placement, and shorter than all of these.
        let compact_bound_s = compact_bound_s.map(|bound_s| bound_s.min(priced.step_s));
        Ok(Answer {
            lower_bound_s,
            searched_cuts_bound_s,
            priced,
            plan,
            compact_bound_s,
            stopped,
            labels: self.labels + self.relaxed_labels,
            simulated: self.pricer.simulated,
        })
    }
}

/// Returns a time for a message, with four digits.
fn seconds(time_s: f64) -> String {
    let (scale, unit) =
        [(1.0, "s"), (1e3, "ms")].into_iter().find(|(scale, _)| time_s * scale >= 1.0).unwrap_or((1e6, "us"));
    #[allow(clippy::cast_sign_loss)] // clamped
    let digits = (3.0 - (time_s * scale).log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{:.digits$} {unit}", time_s * scale)
}
