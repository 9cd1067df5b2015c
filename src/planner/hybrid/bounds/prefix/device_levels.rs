//! Device counts that the tables distinguish, and the range of them that each group of cuts needs.
//!
//! Lemma *Devices that differ* (docs/proofs.md): devices count as whole units of speed. A prefix has at least the units
//! that can do its work in less than the threshold, and at most the units that the stages behind the cut can spare.
//! Only levels between both have an entry. Rounding a number of units up to a level gives the prefix more devices,
//! which only lowers the bound.

use crate::planner::hybrid::{
    bounds::{cut_groups::CutGroups, device_classes::Units},
    subproblem::Subproblem,
};

/// Device counts that have an entry, and the index of each entry.
#[derive(Default)]
pub(super) struct DeviceLevels {
    /// Device counts in units, ascending.
    pub(super) levels: Vec<u32>,
    /// Lowest level that suffices for the stages in front of each group of cuts, and highest level that the stages
    /// behind it can leave.
    pub(super) of_group: Vec<(usize, usize)>,
    /// Entries of all groups, for one placement case.
    pub(super) entries: usize,
}

impl DeviceLevels {
    /// Returns the levels for plans whose stages all work for less than `threshold_s`. A group without such a level
    /// keeps one.
    pub(super) fn new(
        task: &Subproblem<'_>,
        units: &Units,
        groups: &CutGroups,
        work_s: &[f64],
        threshold_s: f64,
        max_levels: u32,
    ) -> Self {
        // No plan uses more than `max_devices` devices. More levels than the fastest of them need would have equal
        // entries.
        let mut speeds: Vec<(f64, u32, u32)> =
            task.cluster.nodes.iter().map(|m| (m.speed, m.devices, units.of(m.speed))).collect();
        speeds.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut max_units, mut devices) = (0, task.max_devices());
        for &(_, of_node, units_each) in &speeds {
            let used = devices.min(of_node);
            max_units += used * units_each;
            devices -= used;
        }
        let levels: Vec<u32> = if max_units <= max_levels {
            (0..=max_units).collect()
        } else {
            let part = |level| (u64::from(max_units) * u64::from(level)).div_ceil(u64::from(max_levels)) as u32;
            (0..=max_levels).map(part).collect()
        };
        let whole_s: f64 = work_s.iter().sum();
        // The devices with the most speed per unit come first: they do a given work with the fewest units.
        speeds.sort_by(|a, b| (b.0 / f64::from(b.2)).total_cmp(&(a.0 / f64::from(a.2))));
        speeds.dedup_by(|b, a| {
            let is_same = a.0.total_cmp(&b.0).is_eq();
            a.1 += if is_same { b.1 } else { 0 };
            is_same
        });
        let (micro_batches, all) = (f64::from(task.micro_batches), f64::from(units.all(task.cluster)));
        // Returns the smallest number of units that does this work. Without the tolerance, a sum that rounds up could
        // ask for one more unit, and so exclude a plan that the threshold allows.
        let min_units = |work_s: f64| {
            let mut speed = micro_batches * (work_s - 1e-9 * whole_s) / threshold_s;
            let mut sum = 0.0;
            for &(speed_each, devices, units_each) in &speeds {
                let (devices, units_each) = (f64::from(devices), f64::from(units_each));
                let units = (devices * units_each).min((speed / speed_each * units_each).ceil().max(0.0));
                speed -= units / units_each * speed_each;
                sum += units;
            }
            if speed > 1e-9 * micro_batches * whole_s / threshold_s { f64::INFINITY } else { sum }
        };
        let below_s = task.model.sums_below(work_s);
        let of_group: Vec<(usize, usize)> = (groups.cuts.iter())
            .map(|cuts| {
                let below_s = || cuts.iter().map(|&cut| below_s[cut]);
                // An entry stands for all cuts of its group, so each end of the range is that of its most generous cut.
                let left = (all - min_units(whole_s - below_s().fold(0.0, f64::max))).max(0.0);
                let needed = min_units(below_s().fold(f64::INFINITY, f64::min));
                let highest = levels.partition_point(|&level| f64::from(level) < left).min(levels.len() - 1);
                let lowest = levels.partition_point(|&level| f64::from(level) < needed).min(highest);
                (lowest, highest)
            })
            .collect();
        let entries = of_group.iter().map(|(lowest, highest)| highest + 1 - lowest).sum();
        Self { levels, of_group, entries }
    }

    /// Returns the lowest level with at least this many units.
    pub(super) fn level(&self, units: u32) -> usize {
        // Where every count has a level, the level is the count.
        if self.levels.get(units as usize) == Some(&units) {
            units as usize
        } else {
            self.levels.partition_point(|&level| level < units)
        }
    }

    /// Returns the index of an entry in its group of cuts. `level` must be at least the lowest level of the group. A
    /// level above the highest one counts as the highest one, since no plan leaves more devices.
    pub(super) fn entry(&self, group: usize, placement_case: usize, level: usize) -> usize {
        let (lowest, highest) = self.of_group[group];
        placement_case * (highest + 1 - lowest) + (level.min(highest) - lowest)
    }
}
