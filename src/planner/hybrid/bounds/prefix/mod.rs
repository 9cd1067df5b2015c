//! Lower bounds on what the stages in front of a cut (the *prefix*) add to a plan's step time.
//!
//! The search builds plans from the last stage to the first. A partial plan is a *suffix*: the stages behind a cut, with the
//! lengths of their critical paths ([`Paths`]). The tables here answer one question: given the cut, the number of free
//! devices and the number of stages behind the cut, by how much must *any* prefix lengthen each of these paths? The search
//! drops a suffix if the sum reaches the threshold. So every entry must be a lower bound: the tables are an admissible
//! heuristic, as in A*.
//!
//! One dynamic program over cuts and device counts fills the tables, from the first cut to the last ([`builder`]). Four
//! relaxations keep them small. Each can only lower an entry, so the bound stays valid:
//!
//! 1. **Placement.** A stage gets the fastest links that any placement has ([`adjacency`]).
//! 2. **Mixed devices.** Devices of different speed count as integer units. A stage is assigned to one class and takes at
//!    least the units of the devices that it would take ([`device_levels`]).
//! 3. **Rounding.** Device counts are rounded up to levels, and similar replica counts share a bucket ([`replica_buckets`]).
//!    Where a model has many cuts, groups of them share an entry ([`group_pairs`]).
//! 4. **Independent minima.** Each of the eight increments is minimized by itself, over all prefixes ([`increments`]).
//!
//! docs/proofs.md, *Stages in front*, proves each increment. `bounds/tests` holds them against simulated pipelines.

mod adjacency;
mod builder;
mod device_levels;
mod group_pairs;
mod increments;
mod replica_buckets;
mod resolution;

use crate::control::Control;
use crate::cost::Totals;
use crate::planner::effort::tables;
use crate::planner::hybrid::{
    bounds::{devices_at_work::busy_s, link_bounds::Links, paths::Paths},
    subproblem::Subproblem,
};
use increments::fast_max;
use resolution::TableAxes;
use std::sync::Arc;

#[cfg(test)]
pub(crate) use increments::INCREMENTS;
pub(crate) use increments::PrefixIncrements;

/// The tables of one micro-batch size and one threshold.
pub(crate) struct PrefixBounds {
    axes: Arc<TableAxes>,
    /// Number of placement cases: 1 if a stage may be placed anywhere. Otherwise case 0 stands for a stage behind the cut that
    /// is spread over nodes, and case 1 + *n* for one on a single node that leaves *n* devices free there.
    placement_cases: usize,
    /// One table for each number of stages behind the cut. The last one also serves larger numbers.
    tables: Vec<Table>,
    /// For each cut, device time of all micro-batches in front of it, on devices of speed 1.
    busy_s: Vec<f64>,
    /// Work of building the tables.
    pub work: u64,
}

/// Place of an entry, apart from the cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryKey {
    table: usize,
    placement_case: usize,
    device_level: usize,
}

/// Increments of the prefixes of each cut, for one number of stages behind it.
#[derive(Clone)]
struct Table {
    /// For each group of cuts an entry for each placement case and device level. Empty where no prefix fits.
    increments: Vec<Vec<PrefixIncrements>>,
    /// For each group of cuts and placement case, the lowest device level of a plan below the threshold.
    first_level: Vec<usize>,
}

impl PrefixBounds {
    /// Builds tables for a pass. Stages that alone reach the threshold are left out. At most `max_behind` numbers of stages
    /// behind a cut have separate tables. If it is 0, placement has a single case. Returns `None` if it was stopped.
    pub(crate) fn new(
        task: &Subproblem<'_>,
        links: &Links,
        threshold_s: f64,
        max_behind: usize,
        control: &Control,
    ) -> Option<Self> {
        Self::with(task, links, threshold_s, max_behind, tables::PASS_RESOLUTION, control)
    }

    /// Returns the key of prefixes with `free` units of devices and `behind` stages behind them. `free_devices` are left on
    /// the node of the stage behind them; `None` if this stage is on several nodes.
    pub(crate) fn place(&self, free: u32, free_devices: Option<u32>, behind: u32) -> EntryKey {
        EntryKey {
            table: (behind as usize).min(self.tables.len() - 1),
            placement_case: free_devices.map_or(0, |devices| 1 + devices as usize).min(self.placement_cases - 1),
            device_level: self.axes.reach.level(free),
        }
    }

    fn at(&self, cut: usize, EntryKey { table, placement_case, device_level }: EntryKey) -> &PrefixIncrements {
        let group = self.axes.groups.of_cut[cut] as usize;
        if device_level < self.axes.reach.of_group[group].0 {
            return &PrefixIncrements::INFEASIBLE;
        }
        let entry = self.axes.reach.entry(group, placement_case, device_level);
        self.tables[table].increments[group].get(entry).unwrap_or(&PrefixIncrements::INFEASIBLE)
    }

    /// Returns a lower bound on the time of any plan from its first forward to its last backward.
    pub(crate) fn min_s(&self) -> f64 {
        let last = self.at(self.axes.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0));
        last.round_trip_s.max(last.backward_busy_s).max(last.forward_busy_s)
    }

    /// Returns the round trip of one micro-batch through the prefix of a cut. Infinite if no prefix fits.
    pub(crate) fn round_trip_s(&self, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).round_trip_s
    }

    /// Returns a lower bound on the step of plans whose prefix has devices with this sum of speeds (*Devices at work*).
    pub(crate) fn busy_s(&self, cut: usize, free_speed: f64) -> f64 {
        if cut == 0 { 0.0 } else { self.busy_s[cut] / free_speed * (1.0 - 1e-12) }
    }

    /// Returns a lower bound on the step of plans that end in a suffix with these paths: the longest of the eight sums.
    pub(crate) fn bound_s(&self, paths: &Paths, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).step_bounds_s(paths).into_iter().fold(f64::NEG_INFINITY, fast_max)
    }

    /// Returns a lower bound on the step of every plan.
    pub(crate) fn whole_s(&self) -> f64 {
        self.bound_s(&Paths::default(), self.axes.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0))
    }
}

/// Returns the time of each layer for one micro-batch at speed 1, for one share of the micro-batch.
fn layers_s(task: &Subproblem<'_>, totals: &Totals) -> Vec<f64> {
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let both = totals.layer_forward_s.iter().zip(&totals.layer_backward_s);
    both.map(|(forward_s, backward_s)| forwards * forward_s + backward_s).collect()
}

/// Returns a lower bound on the step from fine tables below a threshold, and the work of building them.
pub(crate) fn tabled_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    PrefixBounds::with(task, links, threshold_s, usize::MAX, tables::BISECTION_RESOLUTION, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work))
}

/// Returns a lower bound on the step, and the work of finding it: all devices work all the time, or one micro-batch is on its
/// way through.
///
/// Bounds of `threshold_s` and more are not told apart. If time is up, only the first part counts.
pub(crate) fn min_step_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    let busy_s = busy_s(task);
    if busy_s >= threshold_s {
        return (busy_s, 0);
    }
    let (alone_s, spent) = PrefixBounds::new(task, links, threshold_s, 0, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work));
    (alone_s.max(busy_s), spent)
}
