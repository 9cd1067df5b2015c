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
use crate::planner::hybrid::bounds::link_bounds::Links;
use crate::planner::hybrid::bounds::paths::Paths;
use crate::planner::hybrid::subproblem::Subproblem;
use increments::fast_max;
use resolution::TableAxes;
use std::sync::Arc;

#[cfg(test)]
pub(crate) use increments::INCREMENTS;
pub(crate) use increments::PrefixIncrements;

/// The tables.
pub(crate) struct PrefixBounds {
    grouping: Arc<TableAxes>,
    /// How many cases of room there are: one if any stage may be anywhere; else the first for a stage behind the cut
    /// that is spread over machines, the others for one that leaves no, one, two … devices on its machine.
    rooms: usize,
    /// One table for each number of stages behind the cut, the last one for more.
    least: Vec<Table>,
    /// For each cut, what all micro-batches keep devices of speed 1 busy with in front of it, at least.
    busy_s: Vec<f64>,
    /// What all tables together took, in nanoseconds or so.
    pub work: u64,
}

/// Where entries are, but for the cut: the table, the case of room, and the level of devices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryKey {
    table: usize,
    room: usize,
    level: usize,
}

/// What stages in front of each cut add, for one number of stages behind it.
#[derive(Clone)]
struct Table {
    /// For each cut an entry for each case of room and level; empty where no stages stand.
    least: Vec<Vec<PrefixIncrements>>,
    /// For each cut and case of room the lowest level of devices with which any plan is shorter than the threshold.
    first: Vec<usize>,
}

impl PrefixBounds {
    /// Leaves out stages that alone reach the threshold; tells at most so many numbers of stages behind a cut apart, and
    /// machines only if any. `None` if it was stopped.
    pub(crate) fn new(
        task: &Subproblem<'_>,
        links: &Links,
        threshold_s: f64,
        most_behind: usize,
        control: &Control,
    ) -> Option<Self> {
        Self::with(task, links, threshold_s, most_behind, tables::PASS_RESOLUTION, control)
    }

    /// Where stages are that have so many devices, with room for so many on the machine of the stage behind them, if that
    /// lies in one, and so many stages behind them.
    pub(crate) fn place(&self, free: u32, room: Option<u32>, behind: u32) -> EntryKey {
        EntryKey {
            table: (behind as usize).min(self.least.len() - 1),
            room: room.map_or(0, |room| 1 + room as usize).min(self.rooms - 1),
            level: self.grouping.reach.level(free),
        }
    }

    fn at(&self, cut: usize, EntryKey { table, room, level }: EntryKey) -> &PrefixIncrements {
        let group = self.grouping.groups.of_cut[cut] as usize;
        if level < self.grouping.reach.of_group[group].0 {
            &PrefixIncrements::INFEASIBLE
        } else {
            self.least[table].least[group]
                .get(self.grouping.reach.entry(group, room, level))
                .unwrap_or(&PrefixIncrements::INFEASIBLE)
        }
    }

    /// The least that any plan takes from its first forward to its last backward.
    pub(crate) fn least_s(&self) -> f64 {
        let last = self.at(self.grouping.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0));
        last.trip_s.max(last.backward_busy_s).max(last.forward_busy_s)
    }

    /// The least that stages in front of a cut add to one micro-batch on its way through; infinite if none fit.
    pub(crate) fn trip_s(&self, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).trip_s
    }

    /// No plan is shorter whose stages in front of a cut have devices that do so much together, against one of speed 1.
    pub(crate) fn busy_s(&self, cut: usize, free_speed: f64) -> f64 {
        if cut == 0 { 0.0 } else { self.busy_s[cut] / free_speed * (1.0 - 1e-12) }
    }

    /// No plan that ends in a suffix with these paths is shorter.
    pub(crate) fn bound_s(&self, paths: &Paths, cut: usize, place: EntryKey) -> f64 {
        self.at(cut, place).step_bounds_s(paths).into_iter().fold(f64::NEG_INFINITY, fast_max)
    }

    /// No plan is shorter.
    pub(crate) fn whole_s(&self) -> f64 {
        self.bound_s(&Paths::default(), self.grouping.groups.of_cut.len() - 1, self.place(u32::MAX, None, 0))
    }
}

/// What each layer takes for one micro-batch at speed 1, with one of the task's totals.
fn layers_s(task: &Subproblem<'_>, totals: &Totals) -> Vec<f64> {
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let both = totals.layer_forward_s.iter().zip(&totals.layer_backward_s);
    both.map(|(forward_s, backward_s)| forwards * forward_s + backward_s).collect()
}

/// For each layer the least that a micro-batch takes, times its replicas.
fn least_work_s(task: &Subproblem<'_>) -> Vec<f64> {
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let splits: Vec<(f64, &Totals)> = (task.share.iter().zip(0_u32..))
        .filter_map(|(share, replicas)| share.map(|share| (f64::from(replicas), &task.totals[share as usize])))
        .collect();
    (0..task.model.layer_parameter_bytes.len())
        .map(|layer| {
            (splits.iter())
                .map(|(replicas, t)| replicas * (forwards * t.layer_forward_s[layer] + t.layer_backward_s[layer]))
                .fold(f64::INFINITY, f64::min)
        })
        .collect()
}

/// No plan has a shorter step, as far as tables below a threshold say; what making them took.
pub(crate) fn tabled_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    PrefixBounds::with(task, links, threshold_s, usize::MAX, tables::BISECTION_RESOLUTION, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work))
}

/// No plan has a shorter step: as many devices as are of use, the fastest, at work all the time.
pub(crate) fn busy_s(task: &Subproblem<'_>) -> f64 {
    let mut machines: Vec<(f64, u32)> = task.cluster.machines.iter().map(|m| (m.speed, m.devices)).collect();
    machines.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut speed, mut devices) = (0.0, task.most_devices());
    for (each, of_machine) in machines {
        let some = devices.min(of_machine);
        speed += f64::from(some) * each;
        devices -= some;
    }
    f64::from(task.micro_batches) * least_work_s(task).iter().sum::<f64>() / speed
}

/// No plan has a shorter step: all devices at work all the time, or one micro-batch on its way through; what finding that
/// took.
///
/// Steps of `threshold_s` and more don't count; nor does the micro-batch on its way if time is up.
pub(crate) fn least_step_s(task: &Subproblem<'_>, links: &Links, threshold_s: f64, control: &Control) -> (f64, u64) {
    let busy_s = busy_s(task);
    if busy_s >= threshold_s {
        return (busy_s, 0);
    }
    let (alone_s, spent) = PrefixBounds::new(task, links, threshold_s, 0, control)
        .map_or((0.0, 0), |prefixes| (prefixes.whole_s(), prefixes.work));
    (alone_s.max(busy_s), spent)
}
