//! The dynamic program that fills the prefix tables, from the first group of cuts to the last.
//!
//! A *prefix* is the stages in front of a cut between two layers. An entry has the *increments* of prefixes: the least
//! time that any prefix adds to each path of the stages behind the cut. Entries differ in the group of cuts, in the
//! free devices, counted in units and rounded to a *level*, and in the placement case of the stage behind the cut. Each
//! number of stages behind the cut has a table.
//!
//! An entry follows from entries of earlier groups, in which the last stage of the prefix begins. The stages in front
//! of that stage have the devices that it leaves, and one more stage behind them. So their increments are in the table
//! for one more stage. If the last stage begins and ends in the same group, it is left out, which never raises an entry
//! (docs/proofs.md, *Cuts in groups*).

use super::group_pairs::{GroupPair, StagesEndingAt};
use super::increments::{PrefixIncrements, PrefixStage, fast_max};
use super::replica_buckets::ReplicaBucket;
use super::resolution::TableAxes;
use super::{PrefixBounds, Table, layers_s};
use crate::control::Control;
use crate::cost::network::Rate;
use crate::planner::effort::{
    tables::{self, Resolution},
    work,
};
use crate::planner::hybrid::{
    bounds::{
        device_classes::{DeviceClass, Units, device_classes},
        devices_at_work::min_work_s,
        link_bounds::Links,
    },
    settings::Recompute,
    subproblem::Subproblem,
};
use rayon::prelude::*;
use std::sync::Arc;

/// Inputs and resolution of the tables of one threshold.
pub(super) struct TableBuilder<'a> {
    pub(super) task: &'a Subproblem<'a>,
    /// Step time in seconds. Prefixes that occur only in plans with at least this step get no entry.
    pub(super) threshold_s: f64,
    /// Speed of the fastest device. The device of the profile has speed 1.
    pub(super) max_speed: f64,
    /// Speed of the slowest device.
    pub(super) min_speed: f64,
    /// Integer weight of a device, about in proportion to its speed. Levels count these units.
    pub(super) units: Units,
    /// Device classes. Each comes with pairs `(units, devices)`: devices that count this many units, fewest units
    /// first.
    pub(super) classes: Vec<(DeviceClass, Vec<(u32, u32)>)>,
    /// Ranges of replica counts. The stages of a range count as one, which costs no more than any of them.
    pub(super) buckets: Vec<ReplicaBucket>,
    /// Number of placement cases, which [`PrefixBounds`] describes.
    pub(super) placement_cases: usize,
    /// Groups of cuts and levels of devices.
    pub(super) axes: Arc<TableAxes>,
    /// Shortest time of a micro-batch through each layer, over all replica counts, at speed 1.
    pub(super) min_s: Vec<f64>,
    /// Smallest device time of a micro-batch in each layer: its time multiplied by its replicas, at speed 1.
    pub(super) work_s: Vec<f64>,
    /// Sum of `min_s` over the layers below each cut.
    pub(super) min_below_s: Vec<f64>,
    /// Smallest number of buckets, or of tables, that one thread handles.
    pub(super) min_items_per_thread: usize,
}

impl PrefixBounds {
    /// Builds tables of a resolution. [`PrefixBounds::new`] describes the other arguments. Returns `None` if the
    /// search was stopped.
    pub(crate) fn with(
        task: &Subproblem<'_>,
        links: &Links,
        threshold_s: f64,
        max_behind: usize,
        resolution: Resolution,
        control: &Control,
    ) -> Option<Self> {
        let (model, cluster) = (task.model, task.cluster);
        let units = Units::new(task.cluster);
        let speeds = || cluster.nodes.iter().map(|node| node.speed);
        let times_s: Vec<Vec<f64>> = task.totals.iter().map(|totals| layers_s(task, totals)).collect();
        let min_s: Vec<f64> = (0..model.layer_parameter_bytes.len())
            .map(|layer| times_s.iter().map(|each| each[layer]).fold(f64::INFINITY, f64::min))
            .collect();
        let mut builder = TableBuilder {
            task,
            threshold_s,
            max_speed: speeds().fold(0.0, f64::max),
            min_speed: speeds().fold(f64::INFINITY, f64::min),
            classes: (device_classes(task.cluster).into_iter())
                .map(|class| {
                    let each = units.of_class(cluster, &class);
                    (class, each)
                })
                .collect(),
            units,
            buckets: Vec::new(),
            placement_cases: 1,
            axes: Arc::default(),
            min_below_s: model.sums_below(&min_s),
            min_s,
            work_s: min_work_s(task),
            min_items_per_thread: 1,
        };
        let work = builder.choose_resolution(links, resolution, max_behind > 0);
        if work < tables::PARALLEL_WORK {
            // Small tables are not worth the overhead of several threads.
            builder.min_items_per_thread = usize::MAX;
        }
        let entries = builder.axes.device_levels.entries * builder.placement_cases;
        // Total work and memory limit the number of tables. No plan has more stages than cuts. The number in flight
        // grows with the stages behind, but not above the number of micro-batches, so further tables would be equal.
        let mut deepest = (1..=max_behind.min(model.cuts()))
            .take_while(|&tables| work * tables as f64 <= tables::TOTAL_WORK_FACTOR * resolution.max_work)
            .count()
            .min(tables::MAX_ENTRIES / entries.max(1))
            .clamp(1, model.cuts())
            .min(task.micro_batches as usize)
            .min(max_behind);
        // Tables differ mainly in the micro-batches in flight, and so in the memory that a stage needs. If every stage
        // that fits with one stage behind it also fits with the most, several large tables are not worth their time.
        // Above a quarter of the work limit a table counts as large. The quarter is not tuned.
        if work > resolution.max_work / 4.0 && !builder.is_tight(deepest as u32 + 1) {
            deepest = 1;
        }
        let mut max_in_flights: Vec<(u32, u32)> =
            (0..=deepest).map(|behind| task.settings.max_in_flights(behind as u32 + 1, task.micro_batches)).collect();
        // The last table also serves stages farther in front, which may hold up to all micro-batches.
        max_in_flights[deepest].1 = task.micro_batches;
        let (tables, spent) = builder.tables(&max_in_flights, control)?;
        let count = f64::from(task.micro_batches);
        let busy_s = model.sums_below(&builder.work_s).into_iter().map(|below_s| count * below_s).collect();
        Some(Self { axes: builder.axes, placement_cases: builder.placement_cases, tables, busy_s, work: spent })
    }
}

impl TableBuilder<'_> {
    /// Returns whether this number of stages can do the work behind some cut of a group, if each of them works for less
    /// than the threshold. 0 stages are only behind the full cut, which has all layers in front of it.
    pub(super) fn has_behind(&self, group: usize, stages: usize) -> bool {
        if stages == 0 {
            return group + 1 == self.axes.groups.cuts.len();
        }
        // The factor keeps rounding from excluding a plan that the threshold allows.
        let min_s = f64::from(self.task.micro_batches) * self.axes.behind_s[group] * (1.0 - 1e-9);
        min_s <= stages as f64 * self.threshold_s * self.max_speed
    }

    /// Fills one table for each number of stages behind a cut, and returns the tables and their work. Returns `None` if
    /// the search was stopped.
    ///
    /// `max_in_flights` has, for each table, the range of the number in flight of the stage in front of the cut. The
    /// last table also serves larger numbers of stages.
    pub(super) fn tables(&self, max_in_flights: &[(u32, u32)], control: &Control) -> Option<(Vec<Table>, u64)> {
        let task = self.task;
        let groups = self.axes.groups.cuts.len();
        let (placement_cases, device_levels) = (self.placement_cases, &self.axes.device_levels);
        let (lowest, highest) = device_levels.of_group[0];
        let mut first_level = vec![usize::MAX; groups * placement_cases];
        first_level[..placement_cases].fill(lowest);
        let mut increments = vec![Vec::new(); groups];
        increments[0] = vec![PrefixIncrements::EMPTY_PREFIX; (highest + 1 - lowest) * placement_cases];
        let mut tables = vec![Table { increments, first_level }; max_in_flights.len()];
        let deepest = max_in_flights.len() - 1;
        // In a branching model, the exposed all-reduce of a stage follows from that of a smaller stage
        // (`nested_stages`). If there are too many stages to keep, each threshold would have to find the smaller ones
        // again. The tables then leave out the all-reduce, which only lowers the bound.
        let sets = task.sets.as_ref().filter(|sets| sets.is_kept());
        let mut work = 0;
        for to in 1..groups {
            if control.should_stop() {
                return None;
            }
            // A group has no entries in the tables for more stages than layers behind it, and for too few stages to do
            // the work behind it. The last table also serves larger numbers.
            let open: Vec<usize> = (0..=deepest.min(self.axes.layers_behind[to]))
                .filter(|&behind| behind == deepest || self.has_behind(to, behind))
                .collect();
            let ends: Vec<StagesEndingAt> = (self.axes.groups.cuts[to].iter())
                .map(|&end| StagesEndingAt { end, pairs: self.pairs(end), inner: sets.map(|sets| sets.inner(end)) })
                .collect();
            let buckets = self.buckets.par_iter().with_min_len(self.min_items_per_thread);
            let minima: Vec<GroupPair> = buckets.map(|bucket| self.group_pair(to, bucket, &ends)).collect();
            work += work::FIND_STAGE * ends.iter().map(|ends| ends.pairs.len() as u64).sum::<u64>();
            let evaluated = minima
                .iter()
                .map(|pair| (work::EVALUATE_STAGE + work::SUM_GRADIENTS * pair.num_rates as u64) * pair.num_evaluated);
            work += evaluated.sum::<u64>();
            let filled: Vec<(Vec<PrefixIncrements>, u64)> = (open.par_iter().with_min_len(self.min_items_per_thread))
                .map(|&behind| self.row(to, max_in_flights[behind], &tables[(behind + 1).min(deepest)], &minima))
                .collect();
            let mut rows: Vec<Vec<PrefixIncrements>> = vec![Vec::new(); max_in_flights.len()];
            for (&behind, (row, lookups)) in open.iter().zip(filled) {
                rows[behind] = row;
                work += work::LOOK_UP * lookups;
            }
            self.finish(to, &mut rows, &open);
            let (lowest, highest) = device_levels.of_group[to];
            let levels = highest + 1 - lowest;
            for (table, row) in tables.iter_mut().zip(rows) {
                for (at, _) in row.iter().enumerate().filter(|(_, entry)| entry.round_trip_s < f64::INFINITY) {
                    let first = &mut table.first_level[to * placement_cases + at / levels];
                    *first = (lowest + at % levels).min(*first);
                }
                table.increments[to] = row;
            }
        }
        Some((tables, work))
    }

    /// Returns the fewest bytes of a micro-batch that cross a cut of a group.
    fn min_bytes(&self, group: usize) -> f64 {
        let cuts = &self.axes.groups.cuts[group];
        cuts.iter().map(|&cut| self.task.cut_bytes[cut]).fold(f64::INFINITY, f64::min)
    }

    /// Returns the increments of the prefixes that end in the group `to`, for one table, and the number of lookups.
    ///
    /// The times of the last stage of such a prefix are in `minima`, with one item for each bucket. Its number of
    /// micro-batches in flight is in the range `max_in_flight`. The stages in front of it have the increments of
    /// `farther`, the table for one more stage behind.
    pub(super) fn row(
        &self,
        to: usize,
        max_in_flight: (u32, u32),
        farther: &Table,
        minima: &[GroupPair],
    ) -> (Vec<PrefixIncrements>, u64) {
        let (task, threshold_s, placement_cases, device_levels) =
            (self.task, self.threshold_s, self.placement_cases, &self.axes.device_levels);
        let micro_batches = f64::from(task.micro_batches);
        let is_last = to + 1 == self.axes.groups.cuts.len();
        let min_bytes = self.min_bytes(to);
        let (lowest, highest) = device_levels.of_group[to];
        let (mut row, mut lookups) = (Vec::new(), 0);
        let exposes_transfers = !task.settings.overlap_p2p_comm;
        for (bucket, pair) in self.buckets.iter().zip(minima) {
            let num_usages = bucket.usages.len();
            for &from in pair.begin_groups.iter().filter(|&&from| from != to && !farther.increments[from].is_empty()) {
                let (lowest_front, highest_front) = device_levels.of_group[from];
                // The first stage receives nothing.
                let received_bytes = if exposes_transfers && from > 0 { self.min_bytes(from) } else { 0.0 };
                for (usage_index, usage) in bucket.usages.iter().enumerate() {
                    let fitting = pair.fitting(from, usage_index);
                    let forward_s = pair.forward_s[from] / usage.speed;
                    let mut backward_s = pair.backward_s[from] / usage.speed;
                    // Where no stage fits with kept activations, each one recomputes them.
                    if task.recompute == Recompute::ByStage && fitting.kept < max_in_flight.0 {
                        backward_s += forward_s;
                    }
                    let all_s = micro_batches * (forward_s + backward_s);
                    let largest = max_in_flight.1.min(fitting.max());
                    if all_s >= threshold_s || largest < max_in_flight.0 {
                        continue;
                    }
                    for (at, adjacency) in bucket.adjacencies.iter().enumerate() {
                        if is_last && adjacency.behind > 0 {
                            continue; // Case 0 also stands for no stage behind, and the full cut has none.
                        }
                        // A lower level would leave the stages in front too few devices.
                        let first_left = farther.first_level[from * placement_cases + adjacency.own];
                        let first = usage.level_leaving(first_left).max(lowest);
                        if first > highest {
                            continue;
                        }
                        lookups += (highest + 1 - first) as u64;
                        let receive_s = received_bytes * adjacency.receive.s_per_byte;
                        let all_s = all_s + 2.0 * micro_batches * receive_s;
                        let grad_reduce_s = pair.grad_reduce_s(from, bucket.rate_index[at * num_usages + usage_index]);
                        let front = &farther.increments[from][device_levels.entry(from, adjacency.own, lowest_front)..];
                        let before = |left: usize| &front[left.min(highest_front) - lowest_front];
                        // The step is at least the time in which micro-batch 0 arrives and the stage does all its work.
                        // Then the last micro-batch runs backward through the stages in front (`round_trip_s` is both
                        // ways), or the stage reduces its gradients. A prefix whose sum reaches the threshold is long.
                        let is_long = |&left: &usize| {
                            let before = before(left);
                            all_s + fast_max(before.round_trip_s, before.fill_s + grad_reduce_s) >= threshold_s
                        };
                        let levels_left = &usage.levels_left[first - usage.first_level..=highest - usage.first_level];
                        // More devices never lengthen the stages in front, so the levels of long prefixes come first.
                        // Usually all are long, or none: check both ends before the bisection.
                        if levels_left.last().is_none_or(is_long) {
                            continue;
                        }
                        let long = if is_long(&levels_left[0]) { levels_left.partition_point(is_long) } else { 0 };
                        let Rate { s_per_byte, latency_s } = adjacency.transfer;
                        let send_s = if is_last { 0.0 } else { min_bytes * s_per_byte };
                        let exposed_s = task.settings.exposed_transfer_s(receive_s, send_s);
                        let transfer_s = if exposes_transfers { 0.0 } else { send_s };
                        let stage = PrefixStage::new(
                            forward_s + exposed_s,
                            backward_s + exposed_s,
                            grad_reduce_s,
                            transfer_s + if is_last { 0.0 } else { latency_s },
                            largest,
                            task.micro_batches,
                        );
                        row.resize((highest + 1 - lowest) * placement_cases, PrefixIncrements::INFEASIBLE);
                        let start = device_levels.entry(to, adjacency.behind, first);
                        let entries = &mut row[start + long..start + levels_left.len()];
                        for (entry, &left) in entries.iter_mut().zip(&levels_left[long..]) {
                            entry.add_stage(&stage, before(left));
                        }
                    }
                }
            }
        }
        (row, lookups)
    }

    /// Completes the entries of a group, which so far know only stages that begin in earlier groups. Entries that reach
    /// the threshold become infeasible.
    pub(super) fn finish(&self, to: usize, rows: &mut [Vec<PrefixIncrements>], open: &[usize]) {
        let (lowest, highest) = self.axes.device_levels.of_group[to];
        let levels = highest + 1 - lowest;
        for row in rows.iter_mut() {
            // Cases 1, 2, … mean that the stage behind is on one node with 0, 1, … free devices. More of them never
            // lengthen a prefix, so each case takes the minimum with the case before it.
            for at in 2 * levels..row.len() {
                row[at] = row[at].min(&row[at - levels]);
            }
        }
        // A stage inside the group is left out with its devices, which never raises an increment. The stages in front
        // of it then have one more stage behind them, in any placement case. Two cases suffice for the minimum over
        // all: case 0 for a spread stage, and the last one, which by now is the minimum of all cases with one node.
        // Tables for more stages behind come first, since each one completes the one before it.
        if self.axes.groups.cuts[to].len() > 1 {
            let deepest = rows.len() - 1;
            for &behind in open.iter().rev().filter(|&&behind| behind < deepest) {
                let (nearer, farther) = rows.split_at_mut(behind + 1);
                let (row, farther) = (&mut nearer[behind], &farther[0]);
                if farther.is_empty() {
                    continue;
                }
                row.resize(levels * self.placement_cases, PrefixIncrements::INFEASIBLE);
                for (at, entry) in row.iter_mut().enumerate() {
                    let level = at % levels;
                    *entry = entry.min(&farther[level]).min(&farther[(self.placement_cases - 1) * levels + level]);
                }
            }
        }
        // Every plan also takes the time of one micro-batch through the layers behind the cut. Entries that reach the
        // threshold with it are dropped here, which spares later groups their lookups.
        let behind_s = self.axes.behind_s[to] / self.max_speed * (1.0 - 1e-9);
        for entry in rows.iter_mut().flatten().filter(|entry| entry.min_s(behind_s) >= self.threshold_s) {
            *entry = PrefixIncrements::INFEASIBLE;
        }
    }
}
