//! Chooses stages, replicas, devices and micro-batches, and proves how good the choice is.
//!
//! ```text
//! for each micro-batch size:  narrow pass ─▶ plans ─▶ simulate, improve ─▶ threshold
//!                             wide pass under the threshold ─▶ more plans, and a bound on all others
//! ```
//!
//! No plan of the search space has a shorter step than the bound; the best simulated plan is the answer, and how far
//! it lies above the bound is its gap.

mod classics;
mod evaluate;
mod exhaustive;
mod improve;
mod labels;
mod paths;
mod prefixes;
mod price;
mod search;
mod settings;
mod space;
mod task;

use rayon::prelude::*;

use crate::cluster::Cluster;
use crate::control::{Control, Progress};
use crate::cost::Model;
use crate::error::{Error, Result};

pub use classics::{closest, data_parallel, fitting, straight};
pub use evaluate::evaluate;
pub use exhaustive::exhaustive;
pub use price::{Candidate, Priced, Pricer, StageChoice, StagePrice};
pub use settings::{Settings, WarmUp};

use prefixes::least_step_s;
use search::{Found, Suffixes};
use task::Task;

/// How far above the least conceivable step plans are looked for, pass by pass, until one is found. A pass costs little
/// while its threshold is low: nearly every label is dropped at once.
const REACH: [f64; 8] = [1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.5, f64::INFINITY];
/// Labels of a cut that go on while plans are looked for.
const NARROW: usize = 200;
/// Labels of a cut that go on while the bound is proved, pass by pass.
const WIDE: [usize; 3] = [2_000, 20_000, usize::MAX];
/// Plans that are simulated after each pass, for each micro-batch size.
const SIMULATED: usize = 64;
/// Plans that are simulated at most to improve one.
const IMPROVED: u64 = 2_000;

/// The answer to one question.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The plan with the shortest simulated step that was found.
    pub plan: Candidate,
    /// Its price.
    pub priced: Priced,
    /// No plan of the search space has a shorter step.
    pub lower_bound_s: f64,
    /// Whether every placement on the machines is in the search space, not only compact ones.
    pub exact_placement: bool,
    /// Whether every pass ran to its end.
    pub finished: bool,
    /// Suffixes that the search looked at.
    pub labels: u64,
    /// Plans that were simulated.
    pub simulated: u64,
}

/// Finds the plan with the shortest simulated step.
///
/// # Errors
/// [`Error::Argument`] or [`Error::Cluster`] for input that makes no sense, [`Error::Infeasible`] if no plan fits the
/// devices' memory, [`Error::Cancelled`] if it was stopped before there was any plan.
pub fn plan(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    settings.check()?;
    cluster.check()?;
    let mut search = Search::new(model, cluster, settings, control);
    search.is_watched = true;
    search.reach()?;
    for beam in WIDE {
        if search.is_proved() || control.should_stop() {
            break;
        }
        search.pass(search.step_s(), beam)?;
    }
    search.answer()
}

/// One micro-batch size and what is known of it.
struct Known<'a> {
    suffixes: Suffixes<'a>,
    /// None of its plans has a shorter step.
    bound_s: f64,
    /// Up to this length of paths, no pass will find more.
    searched_s: f64,
}

struct Search<'a> {
    model: &'a Model,
    control: &'a Control,
    known: Vec<Known<'a>>,
    pricer: Pricer<'a>,
    best: Option<(f64, Candidate)>,
    labels: u64,
    /// Whether whoever watches `control` wants to hear of this search.
    is_watched: bool,
}

impl<'a> Search<'a> {
    fn new(model: &'a Model, cluster: &'a Cluster, settings: &'a Settings, control: &'a Control) -> Self {
        let questions: Vec<(u32, bool)> = (settings.micro_batches.iter())
            .flat_map(|&micro_batch| settings.recompute.iter().map(move |&recompute| (micro_batch, recompute)))
            .collect();
        let known = questions
            .into_par_iter()
            .map(|(micro_batch, recompute)| {
                let task = Task::new(model, cluster, settings, micro_batch, recompute);
                Known { bound_s: least_step_s(&task), searched_s: 0.0, suffixes: Suffixes::new(task) }
            })
            .collect();
        let pricer = Pricer::new(model, cluster, settings);
        Self { model, control, known, pricer, best: None, labels: 0, is_watched: false }
    }

    fn step_s(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(step_s, _)| *step_s)
    }

    fn lower_bound_s(&self) -> f64 {
        self.known.iter().map(|known| known.bound_s).fold(self.step_s(), f64::min)
    }

    /// Whether more searching can raise no bound.
    fn is_proved(&self) -> bool {
        let step_s = self.step_s();
        self.known.iter().all(|known| known.bound_s >= step_s || known.searched_s >= step_s)
    }

    /// Looks ever farther above the least conceivable step until a plan is found.
    fn reach(&mut self) -> Result<()> {
        let least_s = self.lower_bound_s();
        for reach in REACH {
            let limit_s = (least_s * reach).min(self.step_s());
            self.pass(limit_s, NARROW)?;
            if self.step_s() <= limit_s || self.control.should_stop() {
                break;
            }
        }
        Ok(())
    }

    /// Looks for plans whose paths are shorter than `limit_s`, simulates the best, and improves on them.
    fn pass(&mut self, limit_s: f64, beam: usize) -> Result<()> {
        let control = self.control;
        let found: Vec<Option<Found>> = (self.known.par_iter_mut())
            .map(|known| {
                let is_open = known.bound_s < limit_s && known.searched_s < limit_s;
                is_open.then(|| known.suffixes.pass(limit_s, beam, control))
            })
            .collect();
        let mut plans = Vec::new();
        for (known, found) in self.known.iter_mut().zip(found) {
            let Some(found) = found else { continue };
            let shortest_s = found.plans.first().map_or(f64::INFINITY, |(path_s, _)| *path_s);
            known.bound_s = known.bound_s.max(shortest_s.min(found.bound_s).min(limit_s));
            known.searched_s = known.searched_s.max(found.bound_s.min(limit_s));
            self.labels += found.labels;
            plans.extend(found.plans.into_iter().take(SIMULATED));
        }
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let before_s = self.step_s();
        for (path_s, plan) in plans {
            if path_s >= self.step_s() || (self.best.is_some() && control.should_stop()) {
                break;
            }
            let priced = self.pricer.price(&plan)?;
            if priced.step_s < self.step_s() {
                self.best = Some((priced.step_s, plan));
            }
        }
        if self.step_s() < before_s {
            self.best =
                self.best.take().map(|best| improve::improve(self.model, &mut self.pricer, best, IMPROVED, control));
        }
        if self.is_watched {
            control.report(Progress { best_s: self.step_s(), lower_bound_s: self.lower_bound_s() });
        }
        Ok(())
    }

    fn answer(mut self) -> Result<Answer> {
        let lower_bound_s = self.lower_bound_s();
        let finished = self.is_proved();
        let Some((_, plan)) = self.best else {
            return Err(if self.control.should_stop() {
                Error::Cancelled
            } else {
                Error::infeasible("no plan fits the devices' memory", "use more devices, or devices with more memory")
            });
        };
        Ok(Answer {
            priced: self.pricer.price(&plan)?,
            plan,
            lower_bound_s,
            exact_placement: self.known.iter().all(|known| known.suffixes.exact_placement()),
            finished,
            labels: self.labels,
            simulated: self.pricer.simulated,
        })
    }
}
