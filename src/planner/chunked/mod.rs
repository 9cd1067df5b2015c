//! Plans for schedules that run several stages on a device: interleaved, looped and V-shaped ones.
//!
//! A *group* is the devices that run one rank of the schedule: replicas of all its stages. The search starts from
//! balanced cuts of every [`Shape`], and improves the most promising ones by moving borders between stages and devices
//! between groups, each trial simulated under the memory of its groups. The bound is one on all plans of the question.
//!
//! ```text
//! shapes ─▶ balanced cuts ─▶ simulate ─▶ the best few ─▶ improve ─▶ the better half ─▶ improve twice as long ─▶ …
//! ```

mod bound;
mod improve;
mod run;
mod shapes;

use rayon::prelude::*;

use crate::control::{Control, Progress, Stopped};
use crate::cost::Model;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::planner::hybrid::Settings;
use crate::schedule::{Family, Schedule, family};

pub use bound::lower_bound_s;
pub use run::{Run, evaluate};

use improve::Improver;
use shapes::shapes;

/// Simulations of one candidate have so many actions at most; a larger one would take more than a few hundredths of a
/// second.
pub const MOST_ACTIONS: u64 = 50_000;
/// Shapes that are improved: the most promising ones.
const POOL: usize = 12;
/// Actions that trials of the first round of improvement may have, over all shapes; each round has as many.
const EFFORT: u64 = 3_000_000;

/// A plan of the search, with its price.
#[derive(Debug, Clone)]
pub struct Found {
    /// Samples that enter the pipeline at once.
    pub micro_batch: u32,
    /// Whether activations are recomputed.
    pub recompute: bool,
    /// Cuts of the model around its stages, one more than stages.
    pub cuts: Vec<usize>,
    /// Device numbers of each stage.
    pub devices: Vec<Vec<u32>>,
    /// Who does what in which order.
    pub orders: Schedule,
    /// What that takes and holds.
    pub run: Run,
}

/// What a search found.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The shortest step among plans that fit; if none does, the plan that lacks least.
    pub plan: Found,
    /// No plan of the question with this schedule takes less.
    pub lower_bound_s: f64,
    /// Why the search ended early, if it did.
    pub stopped: Option<Stopped>,
    /// Plans that it simulated.
    pub simulated: u64,
    /// Whether borders could be at every cut; else only at those of one row, each of which holds the one before.
    pub all_cuts: bool,
}

/// Searches plans for the schedule `name`, with each of these numbers of stages on a device, and micro-batches of `sizes`,
/// which are some of those that the settings allow; the bound is about all of them.
///
/// # Errors
/// [`Error::Argument`] for a schedule that doesn't run several stages of one chain on a rank, or a question that makes
/// no sense; [`Error::Infeasible`] if no cut into so many stages exists; [`Error::TimedOut`] or [`Error::Cancelled`] if
/// the search was stopped before it had a plan.
pub fn plan(
    model: &Model,
    cluster: &Cluster,
    settings: &Settings,
    name: &str,
    chunks: &[u32],
    sizes: &[u32],
    control: &Control,
) -> Result<Answer> {
    settings.check()?;
    cluster.check()?;
    let family = several_stages(name)?;
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
                    "there is no cut for `{name}`, which runs several stages on each of two devices or more{}",
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
    let all_cuts = row.len() == model.cuts();
    Ok(Answer { plan: best.into_found(), lower_bound_s, stopped: control.stopped(), simulated, all_cuts })
}

/// Says how good the best plan is that fits.
fn report(pool: &[Improver], others: Option<&Improver>, control: &Control) {
    let fitting = pool.iter().chain(others).map(Improver::best).filter(|run| run.fits()).map(|run| run.step_s);
    let lower_bound_s = control.progress().lower_bound_s;
    control.report(Progress { best_s: fitting.fold(f64::INFINITY, f64::min), lower_bound_s });
}

/// The family `name`, if it runs several stages of one chain on a rank, and a step of it ends.
fn several_stages(name: &str) -> Result<&'static Family> {
    use crate::schedule::{Chunks, Pace};
    let family = family(name)?;
    if family.chunks == Chunks::Exactly(1) || family.chains > 1 || family.pace != Pace::Flush || !family.trains {
        return Err(Error::argument(
            format!("`{name}` doesn't run several stages of one model on each device"),
            "choose `interleaved`, say",
        ));
    }
    Ok(family)
}
