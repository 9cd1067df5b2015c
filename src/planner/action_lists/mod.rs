//! Plans for every schedule except 1F1B, eager 1F1B and GPipe, and the comparison of schedules for one problem.
//!
//! ```text
//! every_plan, or 1F1B's plans ─▶ cuts ─▶ one_stage: run each ─▶ local_search ──┐
//! shapes ─▶ virtual_stages: improve cuts and groups, attempt by attempt ───────┴─▶ evaluate again ─▶ the shortest step
//! ```

mod bound;
mod every_plan;
mod fit;
mod improve;
mod local_search;
mod one_stage;
mod run;
mod shapes;
mod virtual_stages;

use crate::control::{Control, Reports};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{self, CandidatePlan, Settings, WarmUp};
use crate::schedule::{Family, Schedule, family};

pub use bound::lower_bound_s;
pub use fit::fastest;
pub use one_stage::{FRUGAL, ONE_STAGE};
pub use run::{Run, evaluate};
pub use virtual_stages::VIRTUAL_STAGES;

/// Schedules that the hybrid search knows, the one with the most feasible plans first.
///
/// Eager 1F1B has the plans of 1F1B and more, and GPipe needs at least as much memory as either.
pub const CERTIFIED: [(&str, WarmUp); 3] =
    [("eager_1f1b", WarmUp::Eager), ("1f1b", WarmUp::Min), ("gpipe", WarmUp::All)];

/// A planning problem: model, cluster and settings.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// Cuts of the model and their costs.
    pub model: &'a LayerSums,
    /// Nodes and their links.
    pub cluster: &'a Cluster,
    /// Choices and limits. `warm_up` is ignored, since each schedule sets its own.
    pub settings: &'a Settings,
}

/// Restrictions of a framework on schedules with several stages per device (virtual stages).
#[derive(Debug, Clone, Copy, Default)]
pub struct VirtualStageLimits {
    /// Whether it needs at least two micro-batches, and at least one for each rank.
    pub needs_full_ranks: bool,
    /// Whether its Hanayo schedule has a single wave, that is two stages per device.
    pub has_single_wave: bool,
}

/// A plan with its simulated run.
#[derive(Debug, Clone)]
pub struct SimulatedPlan {
    /// Micro-batch size, in samples over all replicas.
    pub micro_batch: u32,
    /// Cuts at the begin and the end of each stage.
    pub ends: Vec<(usize, usize)>,
    /// Devices of each stage, by number.
    pub devices: Vec<Vec<u32>>,
    /// Actions of each rank, in order.
    pub schedule: Schedule,
    /// Time and memory of the simulated run.
    pub run: Run,
}

/// The best plan that was found for a schedule. If none fits, the plan that lacks the least memory.
#[derive(Debug, Clone)]
pub struct FoundPlan {
    /// The plan with its run.
    pub plan: SimulatedPlan,
    /// Lower bound on the step of every plan with this schedule. `None` if no plan fits.
    pub lower_bound_s: Option<f64>,
    /// Whether borders could be at every cut. Otherwise they were limited to one line of nested cuts.
    pub has_all_cuts: bool,
    /// Whether only node-aligned placements were searched.
    pub is_node_aligned: bool,
    /// Number of plans that were simulated.
    pub simulated: u64,
}

/// Result of a search for one schedule.
#[derive(Debug)]
pub enum Outcome {
    /// A plan of a schedule that the hybrid search knows, with a certificate.
    Certified(Box<hybrid::SearchResult>),
    /// A plan of such a schedule that was found after the time for its search had ended. It has no bound.
    Quick(Box<hybrid::SearchResult>),
    /// A simulated plan, which may lack memory.
    Simulated(Box<FoundPlan>),
    /// No plan, for the given reason.
    Nothing(Error),
}

/// Name of a schedule and the result of its search.
pub type Tried = (String, Outcome);

/// Searches the best plan of each of these schedules. At least one must not be 1F1B, eager 1F1B or GPipe.
///
/// If 1F1B fits nowhere, only schedules that need less memory are searched. A schedule that is missing in the result
/// was not searched because the search was stopped. [`Control::stopped`] returns the reason.
///
/// # Errors
/// Returns [`Error::Argument`] for a schedule that can't be planned or an invalid problem. Returns
/// [`Error::Infeasible`] with the shortage of 1F1B or eager 1F1B if that fits nowhere and no schedule with less memory
/// was found to fit. Returns [`Error::TimedOut`] or [`Error::Cancelled`] if the search was stopped before there was any
/// plan.
pub fn search(
    problem: &Problem<'_>,
    names: &[String],
    limits: VirtualStageLimits,
    control: &Control,
) -> Result<Vec<Tried>> {
    problem.settings.check()?;
    problem.cluster.check()?;
    let mut search = Search { problem, names, limits, control, tried: Vec::new() };
    search.run()?;
    if control.should_stop() && !search.tried.iter().any(|(_, outcome)| step_s(outcome).is_some()) {
        return Err(control.error());
    }
    Ok(search.tried)
}

/// State of the search over all schedules.
struct Search<'a> {
    problem: &'a Problem<'a>,
    names: &'a [String],
    limits: VirtualStageLimits,
    control: &'a Control,
    tried: Vec<Tried>,
}

// The certified schedules come first: their best plan supplies the cuts on which other schedules run, and a step that
// later schedules have to beat.
impl Search<'_> {
    fn run(&mut self) -> Result<()> {
        let one_stage: Vec<&'static Family> = self.families(ONE_STAGE)?;
        let certified: Vec<_> = CERTIFIED.into_iter().filter(|(name, _)| self.is_asked(name)).collect();
        let mut found: Vec<CandidatePlan> = Vec::new();
        let mut is_node_aligned = false; // describes the plan on whose cuts other schedules run
        for (name, warm_up) in &certified {
            if !found.is_empty() && self.control.should_stop() {
                return Ok(());
            }
            match self.certified(*warm_up, Reports::Best) {
                Ok(outcome) => {
                    if found.is_empty() {
                        is_node_aligned = has_node_aligned_bound(&outcome);
                    }
                    found.extend(plan_of(&outcome));
                    self.tried.push(((*name).to_owned(), outcome));
                }
                // The first of them needs the least memory, so the others fit nowhere either.
                Err(error @ Error::Infeasible { .. }) if found.is_empty() => return self.frugal(error, &certified),
                Err(error) if found.is_empty() => return Err(error),
                Err(error) => self.tried.push(((*name).to_owned(), Outcome::Nothing(error))),
            }
        }
        if !one_stage.is_empty() {
            // No certified schedule was requested, but its plans are still needed for their cuts.
            if found.is_empty() {
                match self.certified(WarmUp::Min, Reports::Nothing) {
                    Ok(outcome) => {
                        is_node_aligned = has_node_aligned_bound(&outcome);
                        found.extend(plan_of(&outcome));
                    }
                    Err(error @ Error::Infeasible { .. }) => return self.frugal(error, &certified),
                    Err(error) => return Err(error),
                }
            }
            if let Some(all) = one_stage::all(self.problem) {
                self.run_each(&one_stage, &all, false, true)?;
            } else {
                let cuts = one_stage::cuts(self.problem, &found, found[0].micro_batch, self.control);
                self.run_each(&one_stage, &cuts, is_node_aligned, false)?;
            }
        }
        self.virtual_stages()
    }

    /// Searches a schedule that the hybrid search knows, in half of the remaining time. If it reports nothing, only its
    /// cuts are needed, so the last search is left out.
    ///
    /// If that is too short for any plan, spends the rest of the time on any plan that fits, without a bound.
    fn certified(&self, warm_up: WarmUp, reports: Reports) -> Result<Outcome> {
        let Problem { model, cluster, settings } = *self.problem;
        let settings = Settings { warm_up, ..settings.clone() };
        let part = self.control.part(effort::CERTIFIED_SHARE, reports);
        let plan = if reports == Reports::Nothing { hybrid::plan_without_last_search } else { hybrid::plan };
        match plan(model, cluster, &settings, &part) {
            Err(late @ Error::TimedOut { .. }) => {
                let part = self.control.part(1.0, Reports::Nothing);
                let found = hybrid::fitting(model, cluster, &settings, &part).map_err(|_| late)?;
                Ok(Outcome::Quick(Box::new(found)))
            }
            answer => answer.map(|answer| Outcome::Certified(Box::new(answer))),
        }
    }

    /// Plans for the case that 1F1B, and so every schedule that needs as much memory, fits nowhere. `error` states the
    /// shortage.
    fn frugal(&mut self, error: Error, certified: &[(&str, WarmUp)]) -> Result<()> {
        let all = one_stage::all(self.problem);
        let has_all = all.is_some();
        let cuts = all.unwrap_or_else(|| one_stage::sparest(self.problem, self.control));
        // Others than the frugal ones fit only on cuts that do not suit 1F1B, so these are searched if all cuts are.
        let families = if has_all { self.families(ONE_STAGE)? } else { self.families(FRUGAL)? };
        self.run_each(&families, &cuts, false, has_all)?;
        self.virtual_stages()?;
        if !self.tried.iter().any(|(_, outcome)| step_s(outcome).is_some()) {
            return Err(error);
        }
        for (name, _) in certified {
            self.tried.push(((*name).to_owned(), Outcome::Nothing(error.clone())));
        }
        if has_all {
            return Ok(());
        }
        // The other schedules are still run on the sparest cuts, so that the report can state how much memory each
        // lacks.
        let others: Vec<_> =
            self.families(ONE_STAGE)?.into_iter().filter(|family| !FRUGAL.contains(&family.name)).collect();
        self.run_each(&others, &cuts, false, false)
    }

    /// Runs schedules with one stage per device on these cuts. If they are the cuts of all plans, the best step is also
    /// the bound.
    fn run_each(
        &mut self,
        families: &[&'static Family],
        cuts: &[one_stage::Cuts],
        is_node_aligned: bool,
        has_all: bool,
    ) -> Result<()> {
        for family in families {
            let outcome = match one_stage::search(self.problem, family, (cuts, has_all), &self.quiet())? {
                Some(found) => Outcome::Simulated(Box::new(FoundPlan {
                    plan: found.best.into_plan(self.problem),
                    lower_bound_s: found.lower_bound_s,
                    has_all_cuts: true, // every cut of the model was allowed
                    is_node_aligned,
                    simulated: found.simulated,
                })),
                None => Outcome::Nothing(Error::infeasible(
                    "no plan was simulated: no cuts were found, or their steps have too many micro-batches",
                    "choose larger micro-batches, or a smaller batch",
                )),
            };
            self.tried.push((family.name.to_owned(), outcome));
        }
        Ok(())
    }

    /// Searches the requested schedules with several stages per device, all in one search.
    fn virtual_stages(&mut self) -> Result<()> {
        let mut asked = Vec::new();
        for (name, virtual_stages_per_rank) in VIRTUAL_STAGES {
            if self.is_asked(name) {
                let is_single = name == "hanayo" && self.limits.has_single_wave;
                asked.push((family(name)?, if is_single { &[2][..] } else { virtual_stages_per_rank }));
            }
        }
        if asked.is_empty() || (!self.tried.is_empty() && self.control.should_stop()) {
            return Ok(());
        }
        // The shortest step so far decides which schedules are worth further improvement.
        let known_s = self.tried.iter().filter_map(|(_, outcome)| step_s(outcome)).fold(f64::INFINITY, f64::min);
        let found = virtual_stages::best_of_each(
            self.problem,
            &asked,
            self.limits.needs_full_ranks,
            (self.near_size(), known_s),
            &self.quiet(),
        );
        for ((family, _), found) in asked.into_iter().zip(found) {
            let outcome = match found {
                Ok(found) => Outcome::Simulated(Box::new(found)),
                // A schedule that was not reached in time is left out of the result instead of reported as infeasible.
                Err(Error::TimedOut { .. } | Error::Cancelled) if !self.tried.is_empty() => continue,
                Err(error) => Outcome::Nothing(error),
            };
            self.tried.push((family.name.to_owned(), outcome));
        }
        Ok(())
    }

    /// Returns the micro-batch size of a fast plan for eager 1F1B, or the smallest size if that fits nowhere.
    fn near_size(&self) -> u32 {
        let Problem { model, cluster, settings } = *self.problem;
        let eager = Settings { warm_up: WarmUp::Eager, ..settings.clone() };
        let found = hybrid::fitting(model, cluster, &eager, &self.control.part(1.0, Reports::Nothing));
        let smallest = settings.pipeline_micro_batch_sizes.iter().copied().min().unwrap_or(1);
        found.map_or(smallest, |found| found.plan.micro_batch)
    }

    /// Returns a control with all remaining time. If several schedules are searched, it reports no bound, because the
    /// bound of one schedule does not hold for the others.
    fn quiet(&self) -> Control {
        let reports = if self.names.len() == 1 { Reports::All } else { Reports::Best };
        self.control.part(1.0, reports)
    }

    fn is_asked(&self, name: &str) -> bool {
        self.names.iter().any(|asked| asked == name)
    }

    fn families<const N: usize>(&self, names: [&str; N]) -> Result<Vec<&'static Family>> {
        names.into_iter().filter(|name| self.is_asked(name)).map(family).collect()
    }
}

/// Returns the step of an outcome whose plan fits.
fn step_s(outcome: &Outcome) -> Option<f64> {
    match outcome {
        Outcome::Certified(answer) | Outcome::Quick(answer) => Some(answer.evaluated.step_s),
        Outcome::Simulated(found) => found.plan.run.fits().then_some(found.plan.run.step_s),
        Outcome::Nothing(_) => None,
    }
}

/// Returns the plan of an outcome, if the hybrid search knows its schedule.
fn plan_of(outcome: &Outcome) -> Option<CandidatePlan> {
    match outcome {
        Outcome::Certified(answer) | Outcome::Quick(answer) => Some(answer.plan.clone()),
        Outcome::Simulated(_) | Outcome::Nothing(_) => None,
    }
}

/// Returns whether the bound of an outcome holds for node-aligned placements only.
fn has_node_aligned_bound(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Certified(answer) if answer.node_aligned_bound_s.is_some())
}

/// Returns the micro-batch sizes that are tried first: the nearest ones to `near_size` by ratio.
fn near_sizes(sizes: &[u32], near_size: u32) -> Vec<u32> {
    let ratio = |&size: &u32| f64::from(size.max(near_size)) / f64::from(size.min(near_size).max(1));
    let mut nearest = sizes.to_vec();
    nearest.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    nearest.truncate(effort::MAX_SIZES);
    nearest
}
