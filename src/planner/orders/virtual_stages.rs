//! Plans for schedules that run several stages on a device: interleaved, looped and V-shaped ones.
//!
//! A *group* is the devices that run one rank of the schedule: replicas of all its stages. The search starts from
//! balanced cuts of every [`Shape`], and improves the most promising ones by moving borders between stages and devices
//! between groups, each trial simulated under the memory of its groups. The bound is one on all plans of the question.
//!
//! ```text
//! shapes ─▶ balanced cuts ─▶ simulate ─▶ the best few ─▶ improve ─▶ the better half ─▶ improve twice as long ─▶ …
//! ```

use rayon::prelude::*;

use super::bound::lower_bound_s;
use super::improve::Improver;
use super::shapes::{self, shapes};
use super::{Found, MOST_ACTIONS, Problem, near_sizes};
use crate::control::{Control, Progress};
use crate::error::{Error, Result};
use crate::schedule::Family;

/// Schedules of this file, and how many stages on each device are tried.
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

/// Shapes that are improved: the most promising ones.
const POOL: usize = 12;
/// Actions that trials of the first round of improvement may have, over all shapes; each round has as many.
const EFFORT: u64 = 3_000_000;

/// The best plan that was found, or the one that lacks least memory.
///
/// A few micro-batch sizes near `near_size` are tried; while nothing fits, the next few.
///
/// # Errors
/// [`Error::Infeasible`] if there is no cut into so many stages, or all sizes have too many micro-batches;
/// [`Error::TimedOut`] or [`Error::Cancelled`] if the search was stopped before it had a plan.
pub(super) fn best(
    problem: &Problem<'_>,
    family: &'static Family,
    chunks: &[u32],
    near_size: u32,
    control: &Control,
) -> Result<Found> {
    let mut left = few_actions(problem, family.name, chunks)?;
    let mut best: Option<Found> = None;
    let mut refused = None;
    while !left.is_empty() && !best.as_ref().is_some_and(|best| best.plan.run.fits() || control.should_stop()) {
        let mut few = near_sizes(&left, near_size);
        left.retain(|size| !few.contains(size));
        few.sort_unstable();
        match of_sizes(problem, family, chunks, &few, control) {
            Ok(found) => {
                let simulated = found.simulated + best.as_ref().map_or(0, |best| best.simulated);
                if best.as_ref().is_none_or(|best| found.plan.run.is_better_than(&best.plan.run)) {
                    best = Some(found);
                }
                best.iter_mut().for_each(|best| best.simulated = simulated);
            }
            Err(error @ Error::Infeasible { .. }) => refused = refused.or(Some(error)), // these sizes have no cut
            Err(Error::TimedOut { .. }) if best.is_some() => {}
            Err(error) => return Err(error),
        }
    }
    best.ok_or_else(|| refused.unwrap_or_else(|| control.error()))
}

/// Micro-batch sizes that make so few actions that a step can be simulated quickly.
fn few_actions(problem: &Problem<'_>, name: &str, chunks: &[u32]) -> Result<Vec<u32>> {
    let stages = 2 * u64::from(chunks.iter().copied().min().unwrap_or(2));
    let settings = problem.settings;
    let actions = |size: u32| 3 * stages * u64::from(settings.global_batch / size);
    let few: Vec<u32> =
        settings.micro_batch_sizes.iter().copied().filter(|&size| actions(size) <= MOST_ACTIONS).collect();
    match settings.micro_batch_sizes.iter().copied().max() {
        Some(size) if few.is_empty() => Err(Error::infeasible(
            format!(
                "a step of `{name}` with micro-batches of {size} has {} actions or more, and up to {} are simulated",
                in_thousands(actions(size)),
                in_thousands(MOST_ACTIONS)
            ),
            "choose larger micro-batches, a smaller batch, or a schedule with one stage on each device",
        )),
        _ => Ok(few),
    }
}

/// The best plan with micro-batches of `sizes`; the bound is about all sizes.
fn of_sizes(
    problem: &Problem<'_>,
    family: &'static Family,
    chunks: &[u32],
    sizes: &[u32],
    control: &Control,
) -> Result<Found> {
    let &Problem { model, cluster, settings } = problem;
    let row = shapes::row(model);
    let shapes = shapes(cluster, settings, family, (chunks, sizes), row.len() - 1);
    let lower_bound_s = lower_bound_s(model, cluster, settings, family);
    control.report(Progress { lower_bound_s, ..Progress::default() });
    let start = |shape| Improver::start((model, cluster, settings), &row, family, shape, control);
    let mut pool: Vec<Improver> = shapes.into_par_iter().filter_map(start).collect();
    if pool.is_empty() {
        return Err(if control.should_stop() {
            control.error()
        } else {
            Error::infeasible(
                format!(
                    "there is no cut for `{}`, which runs several stages on each of two devices or more{}",
                    family.name,
                    if family.limits.is_empty() { String::new() } else { format!(" and needs {}", family.limits) }
                ),
                "choose a schedule with one stage on each device, smaller micro-batches, or a larger batch",
            )
        });
    }
    let mut simulated = 0;
    let mut others: Option<Improver> = None; // the best of those that are out of the pool
    let mut keep = POOL;
    for effort in [0, EFFORT, EFFORT, EFFORT, EFFORT] {
        report(&pool, others.as_ref(), control);
        let each = effort / pool.len() as u64;
        pool.par_iter_mut().for_each(|improver| improver.improve(each, control));
        let now = pool.iter().chain(&others).map(|i| i.best().score()).fold(f64::INFINITY, f64::min);
        eprintln!("ROUND {} {} {now}", family.name, effort);
        pool.sort_by(|a, b| a.best().score().total_cmp(&b.best().score()));
        for out in pool.drain(keep.min(pool.len())..) {
            simulated += out.simulated;
            if others.as_ref().is_none_or(|best| out.best().is_better_than(best.best())) {
                others = Some(out);
            }
        }
        keep = keep.div_ceil(2);
    }
    simulated += pool.iter().map(|improver| improver.simulated).sum::<u64>();
    let mut best = (pool.into_iter().chain(others))
        .reduce(|best, other| if other.best().is_better_than(best.best()) { other } else { best })
        .ok_or_else(|| control.error())?;
    best.finish(control);
    control.report(Progress { best_s: best.best().step_s, lower_bound_s });
    Ok(Found {
        plan: best.into_plan(),
        lower_bound_s: Some(lower_bound_s),
        has_all_cuts: row.len() == model.cuts(),
        is_node_aligned: true,
        simulated,
    })
}

/// Says how good the best plan is that fits.
fn report(pool: &[Improver], others: Option<&Improver>, control: &Control) {
    let fitting = pool.iter().chain(others).map(Improver::best).filter(|run| run.fits()).map(|run| run.step_s);
    let lower_bound_s = control.progress().lower_bound_s;
    control.report(Progress { best_s: fitting.fold(f64::INFINITY, f64::min), lower_bound_s });
}

/// With a comma after each three digits, as `60,000`.
fn in_thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}
