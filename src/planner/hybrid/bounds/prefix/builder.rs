//! The dynamic program that fills the tables, from the first group of cuts to the last.
//!
//! An entry is made from those of earlier groups: the last prefix stage begins in an earlier group, and the stages in front of
//! it have fewer devices and one more stage behind them. Or it is inside the group, and is left out (*Cuts in groups*).

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
        device_classes::{DeviceClass, Units, kinds},
        devices_at_work::min_work_s,
        link_bounds::Links,
    },
    subproblem::Subproblem,
};
use rayon::prelude::*;
use std::sync::Arc;

/// Everything that the tables of one threshold are made from.
pub(super) struct TableBuilder<'a> {
    pub(super) task: &'a Subproblem<'a>,
    pub(super) threshold_s: f64,
    /// Speed of the fastest device, and of the slowest.
    pub(super) speed: f64,
    pub(super) slowest: f64,
    pub(super) units: Units,
    /// Device classes. Each has the units that one of its devices counts and the number of such devices, fewest units
    /// first.
    pub(super) kinds: Vec<(DeviceClass, Vec<(u32, u32)>)>,
    pub(super) splits: Vec<ReplicaBucket>,
    pub(super) placement_cases: usize,
    pub(super) axes: Arc<TableAxes>,
    /// For each layer the shortest time of a micro-batch, and the smallest product of its time and its replicas.
    pub(super) min_s: Vec<f64>,
    pub(super) work_s: Vec<f64>,
    /// For each cut, the sum of `min_s` over the layers below it.
    pub(super) min_below_s: Vec<f64>,
    /// Fewest buckets, or tables, that one thread handles.
    pub(super) min_shared: usize,
}

impl PrefixBounds {
    /// Builds tables of a resolution.
    pub(crate) fn with(
        task: &Subproblem<'_>,
        links: &Links,
        threshold_s: f64,
        max_behind: usize,
        detail: Resolution,
        control: &Control,
    ) -> Option<Self> {
        let (model, cluster) = (task.model, task.cluster);
        let units = Units::new(task.cluster);
        let speeds = || cluster.machines.iter().map(|machine| machine.speed);
        let times_s: Vec<Vec<f64>> = task.totals.iter().map(|totals| layers_s(task, totals)).collect();
        let min_s: Vec<f64> = (0..model.layer_parameter_bytes.len())
            .map(|layer| times_s.iter().map(|each| each[layer]).fold(f64::INFINITY, f64::min))
            .collect();
        let mut sources = TableBuilder {
            task,
            threshold_s,
            speed: speeds().fold(0.0, f64::max),
            slowest: speeds().fold(f64::INFINITY, f64::min),
            kinds: (kinds(task.cluster).into_iter())
                .map(|kind| {
                    let each = units.of_kind(cluster, &kind);
                    (kind, each)
                })
                .collect(),
            units,
            splits: Vec::new(),
            placement_cases: 1,
            axes: Arc::default(),
            min_below_s: model.sums_below(&min_s),
            min_s,
            work_s: min_work_s(task),
            min_shared: 1,
        };
        let work = sources.choose(links, detail, max_behind > 0);
        if work < tables::PARALLEL_WORK {
            sources.min_shared = usize::MAX;
        }
        let entries = sources.axes.reach.entries * sources.placement_cases;
        let mut deepest = (1..=max_behind.min(model.cuts()))
            .take_while(|&tables| work * tables as f64 <= tables::TOTAL_WORK_FACTOR * detail.max_work)
            .count()
            .min(tables::MAX_ENTRIES / entries.max(1))
            .clamp(1, model.cuts())
            .min(task.micro_batches as usize)
            .min(max_behind);
        if work > detail.max_work / 4.0 && !sources.is_tight(deepest as u32 + 1) {
            deepest = 1;
        }
        let mut max_in_flights: Vec<(u32, u32)> =
            (0..=deepest).map(|behind| task.settings.max_in_flights(behind as u32 + 1, task.micro_batches)).collect();
        max_in_flights[deepest].1 = task.micro_batches; // it stands for all that are farther in front
        let (tables, spent) = sources.tables(&max_in_flights, control)?;
        let count = f64::from(task.micro_batches);
        let busy_s = model.sums_below(&sources.work_s).into_iter().map(|below_s| count * below_s).collect();
        Some(Self { axes: sources.axes, placement_cases: sources.placement_cases, tables, busy_s, work: spent })
    }
}

impl TableBuilder<'_> {
    /// Returns whether this number of stages, each with a layer, fits behind a cut of a group without any of them working for
    /// as long as the threshold.
    pub(super) fn has_behind(&self, group: usize, stages: usize) -> bool {
        if stages == 0 {
            return group + 1 == self.axes.groups.cuts.len();
        }
        let min_s = f64::from(self.task.micro_batches) * self.axes.behind_s[group] * (1.0 - 1e-9);
        min_s <= stages as f64 * self.threshold_s * self.speed
    }

    /// Fills one table for each number of stages behind a cut, and returns them with their work. The stage in front of a cut
    /// has one of its table's `max_in_flights`. The last table also stands for all stages further in front.
    pub(super) fn tables(&self, max_in_flights: &[(u32, u32)], control: &Control) -> Option<(Vec<Table>, u64)> {
        let task = self.task;
        let groups = self.axes.groups.cuts.len();
        let (placement_cases, reach) = (self.placement_cases, &self.axes.reach);
        let (lowest, highest) = reach.of_group[0];
        let mut first_level = vec![usize::MAX; groups * placement_cases];
        first_level[..placement_cases].fill(lowest);
        let mut increments = vec![Vec::new(); groups];
        increments[0] = vec![PrefixIncrements::EMPTY_PREFIX; (highest + 1 - lowest) * placement_cases];
        let mut tables = vec![Table { increments, first_level }; max_in_flights.len()];
        let deepest = max_in_flights.len() - 1;
        // Of a branching model with more stages than are kept, tables know no gradient synchronisation.
        let sets = task.sets.as_ref().filter(|sets| sets.is_kept());
        let mut work = 0;
        for to in 1..groups {
            if control.should_stop() {
                return None;
            }
            let open: Vec<usize> = (0..=deepest.min(self.axes.layers_behind[to]))
                .filter(|&behind| behind == deepest || self.has_behind(to, behind))
                .collect();
            let ends: Vec<StagesEndingAt> = (self.axes.groups.cuts[to].iter())
                .map(|&end| StagesEndingAt { end, pairs: self.pairs(end), inner: sets.map(|sets| sets.inner(end)) })
                .collect();
            let splits = self.splits.par_iter().with_min_len(self.min_shared);
            let between: Vec<GroupPair> = splits.map(|split| self.between(to, split, &ends)).collect();
            work += work::FIND_STAGE * ends.iter().map(|ends| ends.pairs.len() as u64).sum::<u64>();
            let looked = between
                .iter()
                .map(|between| (work::EVALUATE_STAGE + work::SUM_GRADIENTS * between.rates as u64) * between.looked_at);
            work += looked.sum::<u64>();
            let made: Vec<(Vec<PrefixIncrements>, u64)> = (open.par_iter().with_min_len(self.min_shared))
                .map(|&behind| self.row(to, max_in_flights[behind], &tables[(behind + 1).min(deepest)], &between))
                .collect();
            let mut rows: Vec<Vec<PrefixIncrements>> = vec![Vec::new(); max_in_flights.len()];
            for (&behind, (row, looks)) in open.iter().zip(made) {
                rows[behind] = row;
                work += work::LOOK_UP * looks;
            }
            self.finish(to, &mut rows, &open);
            let (lowest, highest) = reach.of_group[to];
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

    /// Returns the increments of prefixes of a group of cuts, and the number of lookups. Their last stage is one of
    /// `between`, its number of micro-batches in flight is in the range `max_in_flight`, and the stages in front of it have
    /// the increments `farther`.
    pub(super) fn row(
        &self,
        to: usize,
        max_in_flight: (u32, u32),
        farther: &Table,
        between: &[GroupPair],
    ) -> (Vec<PrefixIncrements>, u64) {
        let (task, threshold_s, placement_cases, reach) =
            (self.task, self.threshold_s, self.placement_cases, &self.axes.reach);
        let micro_batches = f64::from(task.micro_batches);
        let is_last = to + 1 == self.axes.groups.cuts.len();
        let min_bytes = self.axes.groups.cuts[to].iter().map(|&cut| task.cut_bytes[cut]).fold(f64::INFINITY, f64::min);
        let (lowest, highest) = reach.of_group[to];
        let (mut row, mut looks) = (Vec::new(), 0);
        for (split, between) in self.splits.iter().zip(between) {
            let kinds = split.kinds.len();
            for &from in between.some.iter().filter(|&&from| from != to && !farther.increments[from].is_empty()) {
                let (lowest_front, highest_front) = reach.of_group[from];
                for (which, kind) in split.kinds.iter().enumerate() {
                    let forward_s = between.forward_s[from] / kind.speed;
                    let backward_s = between.backward_s[from] / kind.speed;
                    let all_s = micro_batches * (forward_s + backward_s);
                    let largest = max_in_flight.1.min(between.fitting(from, which));
                    if all_s >= threshold_s || largest < max_in_flight.0 {
                        continue;
                    }
                    for (at, way) in split.ways.iter().enumerate() {
                        if is_last && way.behind > 0 {
                            continue; // nothing is behind
                        }
                        // With fewer there are too few for the stages in front.
                        let enough = kind.with_rest(farther.first_level[from * placement_cases + way.own]).max(lowest);
                        if enough > highest {
                            continue;
                        }
                        looks += (highest + 1 - enough) as u64;
                        let grad_reduce_s = between.grad_reduce_s(from, split.rate_of[at * kinds + which]);
                        let front = &farther.increments[from][reach.entry(from, way.own, lowest_front)..];
                        let before = |rest: usize| &front[rest.min(highest_front) - lowest_front];
                        // The stage's gradients are summed while earlier stages drain. More devices make no stages in
                        // front take longer.
                        let is_long = |&rest: &usize| {
                            let before = before(rest);
                            all_s + fast_max(before.round_trip_s, before.fill_s + grad_reduce_s) >= threshold_s
                        };
                        let rests = &kind.rests[enough - kind.first..=highest - kind.first];
                        // Often it is all of them, or none.
                        if rests.last().is_none_or(is_long) {
                            continue;
                        }
                        let long = if is_long(&rests[0]) { rests.partition_point(is_long) } else { 0 };
                        let Rate { s_per_byte, latency_s } = way.transfer;
                        let transfer_s = if is_last { 0.0 } else { min_bytes * s_per_byte + latency_s };
                        let stage = PrefixStage::new(
                            forward_s,
                            backward_s,
                            grad_reduce_s,
                            transfer_s,
                            largest,
                            task.micro_batches,
                        );
                        row.resize((highest + 1 - lowest) * placement_cases, PrefixIncrements::INFEASIBLE);
                        let start = reach.entry(to, way.behind, enough);
                        let entries = &mut row[start + long..start + rests.len()];
                        for (entry, &rest) in entries.iter_mut().zip(&rests[long..]) {
                            entry.add_stage(&stage, before(rest));
                        }
                    }
                }
            }
        }
        (row, looks)
    }

    /// Completes the entries of a group, which know the stages that begin in earlier groups. Entries that reach the
    /// threshold become infeasible.
    pub(super) fn finish(&self, to: usize, rows: &mut [Vec<PrefixIncrements>], open: &[usize]) {
        let (lowest, highest) = self.axes.reach.of_group[to];
        let levels = highest + 1 - lowest;
        for row in rows.iter_mut() {
            for at in 2 * levels..row.len() {
                row[at] = row[at].min(&row[at - levels]); // more room never harms
            }
        }
        // A stage inside a group is left out, with its devices: there is one stage more behind those in front of it, which
        // may lie anywhere.
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
        let behind_s = self.axes.behind_s[to] / self.speed * (1.0 - 1e-9);
        for entry in rows.iter_mut().flatten().filter(|entry| entry.min_s(behind_s) >= self.threshold_s) {
            *entry = PrefixIncrements::INFEASIBLE;
        }
    }
}
