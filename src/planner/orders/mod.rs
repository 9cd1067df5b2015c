//! Plans for every schedule other than 1F1B, eager 1F1B and GPipe, and which schedule is best for a question.
//!
//! ```text
//! 1F1B's plans ─▶ cuts ─▶ one_stage: run each of them ─────────────────────┐
//! shapes ─▶ virtual_stages: improve cuts and groups, attempt by attempt ───────┴─▶ evaluate again ─▶ the shortest step
//! ```

mod bound;
mod fit;
mod improve;
mod one_stage;
mod run;
mod shapes;
mod virtual_stages;

use crate::control::{Control, Reports};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::effort::orders as effort;
use crate::planner::hybrid::{self, CandidatePlan, Settings, WarmUp};
use crate::schedule::{Family, Schedule, family};

pub use bound::lower_bound_s;
pub use fit::fastest;
pub use one_stage::{FRUGAL, ONE_STAGE};
pub use run::{Run, evaluate};
pub use virtual_stages::VIRTUAL_STAGES;

/// Schedules that the hybrid search knows, the one with the most plans first: eager 1F1B has the plans of 1F1B and
/// more, and GPipe holds as much as either, or more.
pub const CERTIFIED: [(&str, WarmUp); 3] =
    [("eager_1f1b", WarmUp::Eager), ("1f1b", WarmUp::Least), ("gpipe", WarmUp::All)];

/// What is planned.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// Where the model may be cut, and what that costs.
    pub model: &'a LayerSums,
    /// What it runs on.
    pub cluster: &'a Cluster,
    /// What may be chosen. The warm-up is that of each schedule.
    pub settings: &'a Settings,
}

/// What a framework requires of schedules with several stages on a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct VirtualStageLimits {
    /// Two micro-batches or more, and no more ranks than micro-batches.
    pub needs_full_ranks: bool,
    /// Hanayo has a single wave: two stages on each device.
    pub has_single_wave: bool,
}

/// A simulated plan.
#[derive(Debug, Clone)]
pub struct SimulatedPlan {
    /// Samples that enter the pipeline at once.
    pub micro_batch: u32,
    /// Whether activations are recomputed.
    pub recompute: bool,
    /// The cuts around each stage.
    pub ends: Vec<(usize, usize)>,
    /// Device numbers of each stage.
    pub devices: Vec<Vec<u32>>,
    /// Who does what in which order.
    pub orders: Schedule,
    /// What that takes and holds.
    pub run: Run,
}

/// The best plan of a schedule that was found, or the one that lacks least memory.
#[derive(Debug, Clone)]
pub struct FoundPlan {
    /// The plan.
    pub plan: SimulatedPlan,
    /// No plan of the question with this schedule takes less; `None` where no bound is known.
    pub lower_bound_s: Option<f64>,
    /// Whether borders could be at every cut; else only at those of one row, each of which holds the one before.
    pub has_all_cuts: bool,
    /// Whether only node-aligned placements were searched.
    pub is_node_aligned: bool,
    /// Plans that were simulated.
    pub simulated: u64,
}

/// What a search gave for one schedule.
#[derive(Debug)]
pub enum Outcome {
    /// A plan of a schedule that the hybrid search knows.
    Certified(Box<hybrid::SearchResult>),
    /// A plan of such a schedule that was found when the time for the search was up. Its bound is not known.
    Quick(Box<hybrid::SearchResult>),
    /// A simulated plan, which may lack memory.
    Simulated(Box<FoundPlan>),
    /// Why there is no plan.
    Nothing(Error),
}

/// One schedule, and what a search gave for it.
pub type Tried = (String, Outcome);

/// Searches the best plan of each of these schedules, at least one of which is not 1F1B, eager 1F1B or GPipe.
///
/// Where 1F1B fits nowhere, only schedules that hold less than it are searched for. What is missing in the answer was
/// not tried, as the search was stopped; [`Control::stopped`] says why.
///
/// # Errors
/// [`Error::Argument`] for a schedule that can't be planned, or a question that makes no sense; [`Error::Infeasible`]
/// with what 1F1B or eager 1F1B lacks if that fits nowhere and no schedule that holds less was found to fit;
/// [`Error::TimedOut`] or [`Error::Cancelled`] if the search was stopped before there was any plan.
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

struct Search<'a> {
    problem: &'a Problem<'a>,
    names: &'a [String],
    limits: VirtualStageLimits,
    control: &'a Control,
    tried: Vec<Tried>,
}

impl Search<'_> {
    fn run(&mut self) -> Result<()> {
        let one_stage: Vec<&'static Family> = self.families(ONE_STAGE)?;
        let certified: Vec<_> = CERTIFIED.into_iter().filter(|(name, _)| self.is_asked(name)).collect();
        let mut found: Vec<CandidatePlan> = Vec::new();
        let mut is_node_aligned = false; // of the first plan that others are run on
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
                // The others hold as much as the first, or more.
                Err(error @ Error::Infeasible { .. }) if found.is_empty() => return self.frugal(error, &certified),
                Err(error) if found.is_empty() => return Err(error),
                Err(error) => self.tried.push(((*name).to_owned(), Outcome::Nothing(error))),
            }
        }
        if !one_stage.is_empty() {
            if found.is_empty() {
                match self.certified(WarmUp::Least, Reports::Nothing) {
                    Ok(outcome) => {
                        is_node_aligned = has_node_aligned_bound(&outcome);
                        found.extend(plan_of(&outcome));
                    }
                    Err(error @ Error::Infeasible { .. }) => return self.frugal(error, &certified),
                    Err(error) => return Err(error),
                }
            }
            let cuts = one_stage::cuts(self.problem, &found, found[0].micro_batch, self.control);
            self.run_each(&one_stage, &cuts, is_node_aligned)?;
        }
        self.virtual_stages()
    }

    /// The search for a schedule that the hybrid one knows, in half of the time that is left. Where that is too short
    /// for any plan, it is one that is found quickly, in all that is left, without a bound.
    fn certified(&self, warm_up: WarmUp, reports: Reports) -> Result<Outcome> {
        let Problem { model, cluster, settings } = *self.problem;
        let settings = Settings { warm_up, ..settings.clone() };
        match hybrid::plan(model, cluster, &settings, &self.control.part(effort::CERTIFIED_SHARE, reports)) {
            Err(late @ Error::TimedOut { .. }) => {
                let part = self.control.part(1.0, Reports::Nothing);
                let found = hybrid::fitting(model, cluster, &settings, &part).map_err(|_| late)?;
                Ok(Outcome::Quick(Box::new(found)))
            }
            answer => answer.map(|answer| Outcome::Certified(Box::new(answer))),
        }
    }

    /// Where 1F1B fits nowhere, nor any schedule that holds as much, as `error` says.
    fn frugal(&mut self, error: Error, certified: &[(&str, WarmUp)]) -> Result<()> {
        let cuts = one_stage::sparest(self.problem, self.control);
        self.run_each(&self.families(FRUGAL)?, &cuts, false)?;
        self.virtual_stages()?;
        if !self.tried.iter().any(|(_, outcome)| step_s(outcome).is_some()) {
            return Err(error);
        }
        for (name, _) in certified {
            self.tried.push(((*name).to_owned(), Outcome::Nothing(error.clone())));
        }
        let others: Vec<_> =
            self.families(ONE_STAGE)?.into_iter().filter(|family| !FRUGAL.contains(&family.name)).collect();
        self.run_each(&others, &cuts, false)
    }

    /// Runs schedules with one stage a device on these cuts.
    fn run_each(
        &mut self,
        families: &[&'static Family],
        cuts: &[one_stage::Cuts],
        is_node_aligned: bool,
    ) -> Result<()> {
        for family in families {
            let outcome = match one_stage::best(self.problem, family, cuts, &self.quiet())? {
                Some((plan, simulated)) => Outcome::Simulated(Box::new(FoundPlan {
                    plan,
                    lower_bound_s: None,
                    has_all_cuts: true, // those of the model
                    is_node_aligned,
                    simulated,
                })),
                None => Outcome::Nothing(Error::infeasible(
                    "no cut was tried: none was found, or it has too many micro-batches to simulate",
                    "choose larger micro-batches, or a smaller batch",
                )),
            };
            self.tried.push((family.name.to_owned(), outcome));
        }
        Ok(())
    }

    fn virtual_stages(&mut self) -> Result<()> {
        let mut asked = Vec::new();
        for (name, chunks) in VIRTUAL_STAGES {
            if self.is_asked(name) {
                let is_single = name == "hanayo" && self.limits.has_single_wave;
                asked.push((family(name)?, if is_single { &[2][..] } else { chunks }));
            }
        }
        if asked.is_empty() || (!self.tried.is_empty() && self.control.should_stop()) {
            return Ok(());
        }
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
                Err(Error::TimedOut { .. } | Error::Cancelled) if !self.tried.is_empty() => continue,
                Err(error) => Outcome::Nothing(error),
            };
            self.tried.push((family.name.to_owned(), outcome));
        }
        Ok(())
    }

    /// The micro-batch size that eager 1F1B takes in a quick search, the smallest one where that fits nowhere.
    fn near_size(&self) -> u32 {
        let Problem { model, cluster, settings } = *self.problem;
        let eager = Settings { warm_up: WarmUp::Eager, ..settings.clone() };
        let found = hybrid::fitting(model, cluster, &eager, &self.control.part(1.0, Reports::Nothing));
        let smallest = settings.micro_batch_sizes.iter().copied().min().unwrap_or(1);
        found.map_or(smallest, |found| found.plan.micro_batch)
    }

    /// All time that is left; the bound of one schedule bounds no other.
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

/// The step of a plan that fits.
fn step_s(outcome: &Outcome) -> Option<f64> {
    match outcome {
        Outcome::Certified(answer) | Outcome::Quick(answer) => Some(answer.priced.step_s),
        Outcome::Simulated(found) => found.plan.run.fits().then_some(found.plan.run.step_s),
        Outcome::Nothing(_) => None,
    }
}

/// The plan of a schedule that the hybrid search knows.
fn plan_of(outcome: &Outcome) -> Option<CandidatePlan> {
    match outcome {
        Outcome::Certified(answer) | Outcome::Quick(answer) => Some(answer.plan.clone()),
        Outcome::Simulated(_) | Outcome::Nothing(_) => None,
    }
}

fn has_node_aligned_bound(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Certified(answer) if answer.node_aligned_bound_s.is_some())
}

/// Which of the micro-batch sizes are worth trying first: the nearest by ratio.
fn near_sizes(sizes: &[u32], near_size: u32) -> Vec<u32> {
    let ratio = |&size: &u32| f64::from(size.max(near_size)) / f64::from(size.min(near_size).max(1));
    let mut nearest = sizes.to_vec();
    nearest.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    nearest.truncate(effort::MAX_SIZES);
    nearest
}
