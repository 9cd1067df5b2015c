//! Lemma *A pass* (docs/proofs.md#a-pass), for all placements: if a pass over the relaxed space ends below a threshold without
//! a plan, no plan is shorter than the threshold.
//!
//! The threshold of each micro-batch size rises until it reaches the best step or a pass takes too much. Tables alone come
//! first: a threshold below which they leave no plan needs no pass.

use crate::planner::effort::{ALL_WORK, WHOLE, WorkBudget, bounds, passes};
use crate::planner::hybrid::{
    bounds::prefix,
    search::suffix_search::{PassResult, SuffixSearch},
    settings::Settings,
    subproblem::Subproblem,
};
use rayon::prelude::*;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::Result;

/// What is known of one micro-batch size.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Known {
    /// Lower bound on the step of its plans, on any placement.
    pub bound_s: f64,
    /// Whether no further pass over the relaxed space can raise the bound.
    pub is_done: bool,
    /// Smallest threshold below which the prefix tables left plans.
    open_s: Option<f64>,
    /// Whether the last tables took little work.
    is_tabled_soon: bool,
    /// Rise of the next threshold above the bound, after the first pass.
    rise_s: Option<f64>,
    /// Highest threshold of a complete pass, and the work of its labels.
    ended: Option<(f64, u64)>,
    /// Passes that reached their limits.
    failed: u32,
    /// Smallest threshold of such a pass.
    failed_s: Option<f64>,
    /// Smallest allowance that was too little for a pass.
    too_little: Option<u64>,
}

impl Known {
    /// Forgets all passes, and keeps the bound.
    fn open_again(&mut self) {
        let Self { bound_s, open_s, is_tabled_soon, .. } = *self;
        *self = Self { bound_s, open_s, is_tabled_soon, ..Self::default() };
    }

    /// Goes on with the refined space, if it may raise the bound and its passes may be complete.
    fn refine(&mut self, suffixes: &mut SuffixSearch<'_>, is_fine: bool, allowed: u64) {
        let is_soon = self.ended.is_some_and(|(_, work)| bounds::REFINED_FACTOR * work <= allowed);
        if is_fine && is_soon && suffixes.refine() {
            self.open_again();
            self.rise_s = Some(bounds::REFINED_RISE * self.bound_s);
        }
    }
}

/// Labels and work of raising the bounds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spent {
    pub labels: u64,
    pub work: u64,
}

/// Raises the bounds of all sizes towards `step_s`, the lowest first, as far as `effort` goes.
pub(crate) fn raise(
    sizes: &mut [(&mut SuffixSearch<'_>, &mut Known)],
    step_s: f64,
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    let mut spent = Spent::default();
    let unknown = sizes.par_iter_mut().filter(|(_, known)| known.bound_s <= 0.0);
    spent.work += (unknown)
        .map(|(suffixes, known)| {
            let (first_s, work) = prefix::min_step_s(&suffixes.task, suffixes.links(true), step_s, control);
            known.bound_s = known.bound_s.max(first_s.min(step_s));
            work
        })
        .sum::<u64>();
    // With much more than before, what took too much may not.
    let count = sizes.iter().filter(|(_, known)| !known.is_done || known.too_little.is_some()).count() as u64;
    let allowed = effort.shared_out(0, 0, count).work_of_pass;
    for (suffixes, known) in sizes.iter_mut() {
        let is_more = known.too_little.is_some_and(|then| allowed as f64 > bounds::RETRY_FACTOR * then as f64);
        // What has no more to say has where it tells more apart.
        let is_all = known.is_done && known.too_little.is_none();
        if is_more {
            known.open_again();
        } else if is_all {
            known.refine(suffixes, effort.is_fine, allowed);
        }
    }
    // Beyond the bound of a size that goes no further, no other one matters.
    let mut max_s = step_s;
    loop {
        for (_, known) in sizes.iter().filter(|(_, known)| known.is_done) {
            max_s = max_s.min(known.bound_s);
        }
        let min_s = sizes.iter().map(|(_, known)| known.bound_s).fold(f64::INFINITY, f64::min);
        let is_much = spent.labels >= effort.labels || spent.work >= effort.work;
        if min_s >= max_s || is_much || control.should_stop() {
            return spent;
        }
        let rise_s = (passes::RISE * (step_s - min_s)).max(passes::MIN_RISE * step_s);
        let limit_s = if step_s.is_finite() { max_s.min(min_s + rise_s) } else { step_s };
        let is_open = |known: &Known| !known.is_done && known.bound_s < limit_s;
        let count = sizes.iter().filter(|(_, known)| is_open(known)).count() as u64;
        let effort = effort.shared_out(spent.labels, spent.work, count);
        let mut bounds: Vec<f64> =
            sizes.iter().filter(|(_, known)| is_open(known)).map(|(_, known)| known.bound_s).collect();
        bounds.sort_by(f64::total_cmp);
        let lowest_s = bounds.get(bounds::SIZES_AT_ONCE - 1).copied().unwrap_or(f64::INFINITY);
        let open = sizes.par_iter_mut().filter(|(_, known)| is_open(known) && known.bound_s <= lowest_s);
        let found: Vec<Spent> = open
            .map(|(suffixes, known)| {
                let open_s = known.open_s.unwrap_or(f64::INFINITY);
                if max_s.is_finite() && open_s > known.bound_s + bounds::TABLE_TOLERANCE * limit_s {
                    tabled(suffixes, known, (limit_s, max_s), effort, control)
                } else {
                    passed(suffixes, known, limit_s, effort, control)
                }
            })
            .collect();
        for each in found {
            spent.labels += each.labels;
            spent.work += each.work;
        }
    }
}

/// Raises the bound of one size by tables. Once they are known to take little, the threshold is `max_s`, which
/// completes many a size at once.
fn tabled(
    suffixes: &SuffixSearch<'_>,
    known: &mut Known,
    (limit_s, max_s): (f64, f64),
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    let max_s = if known.is_tabled_soon { max_s } else { limit_s };
    // Halfway to where plans are left, or as far as anybody asks.
    let limit_s = known.open_s.map_or(max_s, |open_s| max_s.min(known.bound_s.midpoint(open_s)));
    let (min_s, work) = prefix::tabled_s(&suffixes.task, suffixes.links(true), limit_s, control);
    if min_s < limit_s {
        known.open_s = Some(limit_s);
    }
    known.bound_s = known.bound_s.max(min_s.min(limit_s));
    known.is_tabled_soon = bounds::FAST_TABLES * work < effort.work;
    Spent { labels: 0, work }
}

/// Raises the bound of one size by a pass over the relaxed space.
fn passed(
    suffixes: &mut SuffixSearch<'_>,
    known: &mut Known,
    limit_s: f64,
    effort: WorkBudget,
    control: &Control,
) -> Spent {
    let allowed = effort.work_of_pass;
    let rise_s = known.rise_s.unwrap_or(bounds::FIRST_RISE * known.bound_s);
    let limit_s = limit_s.min(known.bound_s + rise_s);
    let nearer_s = known.failed_s.map(|failed_s| known.bound_s + bounds::NEXT_SHARE * (failed_s - known.bound_s));
    let limit_s = limit_s.min(nearer_s.unwrap_or(f64::INFINITY));
    let Some(found) = suffixes.relaxed_pass(limit_s, effort, control) else {
        known.is_done = true;
        return Spent::default();
    };
    let PassResult { shortest_s, bound_s, labels, work, tables, .. } = found;
    known.bound_s = known.bound_s.max(shortest_s.min(bound_s).min(limit_s));
    if bound_s < shortest_s.min(limit_s) {
        known.failed += 1;
        known.failed_s = Some(limit_s);
        known.is_done = known.failed >= bounds::MAX_FAILED_PASSES;
        known.too_little = known.too_little.min(Some(allowed)).or(Some(allowed));
    } else {
        let is_close = known.failed_s.is_some_and(|failed_s| failed_s < (1.0 + bounds::MIN_DISTANCE) * known.bound_s);
        // The higher a threshold, the more a pass takes, and soon much more.
        let part = work as f64 / allowed as f64;
        let wanted_s = if part < bounds::LITTLE_WORK { 2.0 * rise_s } else { rise_s };
        // What labels take grows by about the same factor from each threshold to one as far above.
        let now = (limit_s, (work - tables).max(allowed / bounds::MIN_SHARE));
        let likely_s = known.ended.replace(now).map_or(f64::INFINITY, |(before_s, before)| {
            let grown = (now.1 as f64 / before as f64).ln();
            let left =
                (bounds::PREDICTED_SHARE * allowed.saturating_sub(tables).max(1) as f64 / now.1 as f64).ln().max(0.0);
            if grown > 0.0 { left * (limit_s - before_s) / grown } else { f64::INFINITY }
        });
        known.rise_s = Some(wanted_s.min(likely_s));
        let is_much = is_close || likely_s < bounds::MIN_PREDICTED_RISE * known.bound_s;
        known.is_done = shortest_s < limit_s || is_much;
        if shortest_s < limit_s {
            known.too_little = None; // that is all there is to know
            known.refine(suffixes, effort.is_fine, allowed);
        } else if is_much {
            known.too_little = known.too_little.min(Some(allowed)).or(Some(allowed));
        }
    }
    Spent { labels, work }
}

/// Returns a lower bound on the step over all plans and placements. Passes look no higher than `below_s`.
///
/// This is the bound that [`crate::planner::hybrid::plan`] gives for clusters whose placements are too many to try; it holds for small
/// ones as well, where [`crate::planner::hybrid::exhaustive`] can be held against it.
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for input that makes no sense.
pub fn min_step_s(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    below_s: f64,
    control: &Control,
) -> Result<f64> {
    settings.check()?;
    cluster.check()?;
    let mut sizes: Vec<(SuffixSearch<'_>, Known)> = Subproblem::all(model, cluster, settings)
        .into_iter()
        .map(|task| (SuffixSearch::relaxed(task), Known::default()))
        .collect();
    let mut each: Vec<(&mut SuffixSearch<'_>, &mut Known)> =
        sizes.iter_mut().map(|(suffixes, known)| (suffixes, known)).collect();
    raise(&mut each, below_s, WHOLE.within(ALL_WORK / 2).relaxed(true), control);
    Ok(sizes.iter().map(|(_, known)| known.bound_s).fold(below_s, f64::min))
}
