//! Plans for schedules with several stages per device: interleaved, looped and V-shaped schedules.
//!
//! A *group* is the set of devices that run one rank of the schedule. Each device holds a replica of all stages of the
//! group. The search starts from balanced cuts of every [`Shape`]. It improves the most promising ones by moving
//! borders between stages and devices between groups. Each attempt is simulated under the memory of its groups. The
//! bound holds for all plans of the problem.
//!
//! ```text
//! shapes ─▶ balanced cuts ─▶ simulate ─▶ the best few ─▶ improve ─▶ the better half ─▶ improve twice as long ─▶ …
//! ```

use crate::planner::effort::action_lists as effort;
use rayon::prelude::*;

use super::bound::lower_bound_s;
use super::improve::Improver;
use super::shapes::{self, Shape, shapes};
use super::{FoundPlan, Problem, near_sizes};
use crate::control::{Control, Progress};
use crate::error::{Error, Result};
use crate::schedule::Family;

/// Schedules of this module, with the numbers of stages per device that are tried.
pub const VIRTUAL_STAGES: [(&str, &[u32]); 9] = [
    ("interleaved", &[2, 3, 4, 6]),
    ("interleaved_overlap", &[2, 3, 4, 6]),
    ("looped_bfs", &[2, 3, 4, 6]),
    ("hanayo", &[2, 4]),
    ("interleaved_zb", &[2, 3, 4, 6]),
    ("zb_v", &[2]),
    ("v_half", &[2]),
    ("v_min", &[2]),
    ("dualpipe_v", &[2]),
];

/// Returns the best plan that was found for each schedule in `asked`, in the same order. If none fits, the plan with
/// the least missing memory.
///
/// First a few micro-batch sizes near `near_size` are tried. While nothing fits, the next few follow. `known_s` is the
/// shortest step of other schedules. If it is infinite and there is a single schedule, this schedule is improved
/// regardless of its step.
pub(super) fn best_of_each(
    problem: &Problem<'_>,
    asked: &[(&'static Family, &'static [u32])],
    needs_full_ranks: bool,
    (near_size, known_s): (u32, f64),
    control: &Control,
) -> Vec<Result<FoundPlan>> {
    let row = shapes::row(problem.model);
    let start = |&(family, virtual_stages_per_rank)| {
        Search::new(problem, &row, (family, virtual_stages_per_rank), needs_full_ranks, near_size).started(control)
    };
    let searches: Vec<Search<'_>> = asked.par_iter().map(start).collect();
    // All schedules end their first round before any of them starts a second one, so that the result does not depend on
    // the number of threads.
    let best_s = searches.iter().map(Search::step_s).fold(known_s, f64::min);
    let finish = |search: Search<'_>| {
        let step_s = search.step_s();
        // In measurements, later rounds shortened no step by this factor, so a schedule further behind is given up.
        search.finished(step_s == f64::INFINITY || step_s <= effort::BEHIND * best_s, control)
    };
    searches.into_par_iter().map(finish).collect()
}

/// The search for one schedule.
struct Search<'a> {
    problem: &'a Problem<'a>,
    row: &'a [usize],
    family: &'static Family,
    virtual_stages_per_rank: &'a [u32],
    needs_full_ranks: bool,
    near_size: u32,
    /// Micro-batch sizes that have not been tried yet.
    left: Vec<u32>,
    /// Shapes of the sizes that are being tried.
    pool: Option<Pool<'a>>,
    /// The best plan of the sizes tried before. It does not fit.
    best: Option<FoundPlan>,
    /// First reason for which sizes were refused.
    refused: Option<Error>,
}

impl<'a> Search<'a> {
    fn new(
        problem: &'a Problem<'a>,
        row: &'a [usize],
        (family, virtual_stages_per_rank): (&'static Family, &'a [u32]),
        needs_full_ranks: bool,
        near_size: u32,
    ) -> Self {
        let (left, refused) = match few_actions(problem, family.name, virtual_stages_per_rank) {
            Ok(left) => (left, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        Self {
            problem,
            row,
            family,
            virtual_stages_per_rank,
            needs_full_ranks,
            near_size,
            left,
            pool: None,
            best: None,
            refused,
        }
    }

    /// Starts the search with the next few sizes that have any cuts, and runs the first round.
    fn started(mut self, control: &Control) -> Self {
        while self.pool.is_none() && !self.left.is_empty() && !control.should_stop() {
            let mut few = near_sizes(&self.left, self.near_size);
            self.left.retain(|size| !few.contains(size));
            // Sorted, so that the order of shapes does not depend on `near_size`.
            few.sort_unstable();
            match Pool::new(&self, &few, control) {
                Ok(mut pool) => {
                    // A round without effort only ranks the shapes, and drops all but the most promising ones.
                    pool.improve(0, control);
                    pool.improve(effort::ROUND_ACTIONS, control);
                    self.pool = Some(pool);
                }
                Err(error) => self.refused = self.refused.or(Some(error)),
            }
        }
        self
    }

    /// Returns the shortest step that fits, or infinity if none does.
    fn step_s(&self) -> f64 {
        self.pool.as_ref().map_or(f64::INFINITY, Pool::step_s)
    }

    /// Ends the search and returns its best plan, after further rounds if they are worth it.
    ///
    /// # Errors
    /// Returns [`Error::Infeasible`] if the model can't be cut into enough stages, or if all sizes have too many
    /// micro-batches. Returns [`Error::TimedOut`] or [`Error::Cancelled`] if the search was stopped before it had a
    /// plan.
    fn finished(mut self, is_worth_it: bool, control: &Control) -> Result<FoundPlan> {
        while let Some(mut pool) = self.pool.take() {
            if is_worth_it {
                (1..effort::ROUNDS).for_each(|_| pool.improve(effort::ROUND_ACTIONS, control));
            }
            let mut found = pool.into_found(self.problem, self.row, control)?;
            found.simulated += self.best.as_ref().map_or(0, |best| best.simulated);
            let fits = found.plan.run.fits();
            match &mut self.best {
                Some(best) if !found.plan.run.is_better_than(&best.plan.run) => best.simulated = found.simulated,
                best => *best = Some(found),
            }
            // Other micro-batch sizes need more memory or less: try them only while nothing fits.
            if !fits {
                self = self.started(control);
            }
        }
        self.best.ok_or_else(|| self.refused.unwrap_or_else(|| control.error()))
    }
}

/// Returns the micro-batch sizes with few enough actions that a step can be simulated.
fn few_actions(problem: &Problem<'_>, name: &str, virtual_stages_per_rank: &[u32]) -> Result<Vec<u32>> {
    let stages = 2 * u64::from(virtual_stages_per_rank.iter().copied().min().unwrap_or(2));
    let settings = problem.settings;
    let actions = |size: u32| 3 * stages * u64::from(settings.global_batch / size);
    let few: Vec<u32> = settings
        .pipeline_micro_batch_sizes
        .iter()
        .copied()
        .filter(|&size| actions(size) <= effort::MAX_ACTIONS)
        .collect();
    match settings.pipeline_micro_batch_sizes.iter().copied().max() {
        Some(size) if few.is_empty() => Err(Error::infeasible(
            format!(
                "a step of `{name}` with micro-batches of {size} has {} actions or more, and up to {} are simulated",
                in_thousands(actions(size)),
                in_thousands(effort::MAX_ACTIONS)
            ),
            "choose larger micro-batches, a smaller batch, or a schedule with one stage on each device",
        )),
        _ => Ok(few),
    }
}

/// The most promising shapes of a few micro-batch sizes.
struct Pool<'a> {
    shapes: Vec<Improver<'a>>,
    /// The best shape that was dropped from the pool.
    others: Option<Improver<'a>>,
    /// Number of usual shapes, and of extra ones, that stay after the next round.
    keep: usize,
    /// Lower bound on the step of all plans, over all micro-batch sizes of the problem.
    lower_bound_s: f64,
    simulated: u64,
}

impl<'a> Pool<'a> {
    fn new(search: &Search<'a>, sizes: &[u32], control: &Control) -> Result<Self> {
        let &Search { problem, row, family, virtual_stages_per_rank, .. } = search;
        let &Problem { model, cluster, settings } = problem;
        let mut shapes = shapes(cluster, settings, family, (virtual_stages_per_rank, sizes), row.len() - 1);
        if search.needs_full_ranks {
            let micro_batches = |shape: &Shape| (settings.global_batch / shape.micro_batch) as usize;
            shapes.retain(|shape| micro_batches(shape) > 1 && shape.replicas.len() <= micro_batches(shape));
        }
        // There are at least two groups, so none has all devices.
        let lower_bound_s = lower_bound_s(model, cluster, settings, family, cluster.devices().saturating_sub(1));
        control.report(Progress { lower_bound_s, ..control.progress() });
        let start = |shape| Improver::start((model, cluster, settings), row, family, shape, control);
        let shapes: Vec<Improver<'a>> = shapes.into_par_iter().filter_map(start).collect();
        if !shapes.is_empty() {
            return Ok(Self { shapes, others: None, keep: effort::IMPROVED_SHAPES, lower_bound_s, simulated: 0 });
        }
        control.check()?;
        if search.needs_full_ranks && sizes.iter().all(|size| settings.global_batch / size < 2) {
            return Err(Error::infeasible(
                format!("`{}` needs two micro-batches or more, and all sizes make one of the whole batch", family.name),
                "choose smaller micro-batches, with `pipeline_micro_batch_size`, or a larger batch",
            ));
        }
        let needs = if family.limits.is_empty() { String::new() } else { format!(" and needs {}", family.limits) };
        Err(Error::infeasible(
            format!(
                "there is no cut for `{}`, which runs several stages on each of two devices or more{needs}",
                family.name
            ),
            "choose a schedule with one stage on each device, smaller micro-batches, or a larger batch",
        ))
    }

    /// Runs one round: improves all shapes with an equal part of `effort`, and keeps the best ones.
    ///
    /// Extra shapes take no part from the usual ones, so that they never lengthen the step.
    fn improve(&mut self, effort: u64, control: &Control) {
        control.report(Progress { best_s: self.step_s(), lower_bound_s: self.lower_bound_s });
        let usual = self.shapes.iter().filter(|improver| !improver.is_extra()).count() as u64;
        let each = effort / usual.max(1);
        self.shapes.par_iter_mut().for_each(|improver| improver.improve(each, control));
        self.shapes.sort_by(|a, b| a.best().score().total_cmp(&b.best().score()));
        let mut kept = [0, 0];
        for improver in std::mem::take(&mut self.shapes) {
            let kept = &mut kept[usize::from(improver.is_extra())];
            *kept += 1;
            if *kept <= self.keep {
                self.shapes.push(improver);
                continue;
            }
            // A dropped shape may still be the best that fits, because shapes are ranked by a score that allows missing
            // memory.
            self.simulated += improver.simulated;
            if self.others.as_ref().is_none_or(|best| improver.best().is_better_than(best.best())) {
                self.others = Some(improver);
            }
        }
        self.keep = self.keep.div_ceil(2);
    }

    /// Returns the shortest step that fits, or infinity if none does.
    fn step_s(&self) -> f64 {
        let runs = self.shapes.iter().chain(&self.others).map(Improver::best);
        runs.filter(|run| run.fits()).map(|run| run.step_s).fold(f64::INFINITY, f64::min)
    }

    /// Returns the best plan of the pool.
    fn into_found(self, problem: &Problem<'_>, row: &[usize], control: &Control) -> Result<FoundPlan> {
        let simulated = self.simulated + self.shapes.iter().map(|improver| improver.simulated).sum::<u64>();
        let mut best = (self.shapes.into_iter().chain(self.others))
            .reduce(|best, other| if other.best().is_better_than(best.best()) { other } else { best })
            .ok_or_else(|| control.error())?;
        best.finish(control);
        let best_s = if best.best().fits() { best.best().step_s } else { f64::INFINITY };
        control.report(Progress { best_s, lower_bound_s: self.lower_bound_s });
        Ok(FoundPlan {
            plan: best.into_plan(),
            lower_bound_s: Some(self.lower_bound_s),
            has_all_cuts: row.len() == problem.model.cuts(),
            // Groups take devices in a few fixed schedules, so not every placement was tried.
            is_node_aligned: true,
            simulated,
        })
    }
}

/// Formats a number with a comma after each three digits, for instance `60,000`.
fn in_thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}
