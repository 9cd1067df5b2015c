//! How fine the tables are: groups of cuts, buckets of replica counts and levels of devices that the work limit allows.
//!
//! A coarser table is a weaker bound, and never a wrong one.

use super::builder::TableBuilder;
use super::device_levels::DeviceLevels;
use super::layers_s;
use super::replica_buckets::{BucketUsage, ReplicaBucket};
use crate::cost::network::Rate;
use crate::cost::{self, Totals};
use crate::planner::effort::tables::{self, Resolution};
use crate::planner::hybrid::bounds::{cut_groups::CutGroups, link_bounds::Links};
use std::sync::Arc;

/// Groups of cuts and levels of devices that have entries of their own.
#[derive(Default)]
pub(super) struct TableAxes {
    pub(super) groups: CutGroups,
    pub(super) reach: DeviceLevels,
    /// For each group, the shortest time of a micro-batch behind one of its cuts, and the most layers behind one.
    pub(super) behind_s: Vec<f64>,
    pub(super) layers_behind: Vec<usize>,
}

impl TableBuilder<'_> {
    /// Chooses replica buckets, groups of cuts, levels of devices and placement cases. Returns the lookups of one
    /// table.
    pub(super) fn choose(&mut self, links: &Links, detail: Resolution, has_rooms: bool) -> f64 {
        // A plan has hardly more stages than micro-batches, and each stage loses a group of cuts, or half of what is joined.
        let stages = f64::from(self.task.micro_batches.min(tables::ASSUMED_STAGES));
        let cuts = self.task.model.cuts();
        let mut tried: Vec<(f64, usize, f64)> = std::iter::once(cuts.min(detail.max_cut_groups))
            .chain(tables::CUT_GROUP_COUNTS)
            .filter(|&most| most <= cuts.min(detail.max_cut_groups))
            .map(|most| (if most < cuts { stages / most as f64 } else { 0.0 }, most))
            .flat_map(|(lost, most)| tables::REPLICA_RATIOS.map(|apart| (lost + (apart - 1.0) / 2.0, most, apart)))
            .collect();
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut tried = tried.into_iter();
        let mut max_levels = tables::MAX_DEVICE_LEVELS;
        let mut known: Vec<Arc<TableAxes>> = Vec::new();
        let mut work;
        loop {
            if let Some((_, most, apart)) = tried.next() {
                let axes = known.iter().find(|known| known.groups.most == most).cloned();
                self.axes = axes.unwrap_or_else(|| {
                    known.push(Arc::new(self.grouped(most, max_levels)));
                    known[known.len() - 1].clone()
                });
                self.splits = ReplicaBucket::all(self.task, &self.kinds, apart);
            } else {
                max_levels /= 2;
                self.axes = Arc::new(self.grouped(self.axes.groups.most, max_levels));
            }
            for split in &mut self.splits {
                let levels = &self.axes.reach.levels;
                for kind in &mut split.kinds {
                    kind.first = levels.partition_point(|&level| level < kind.units);
                    let enough = levels[kind.first..].iter();
                    kind.rests = enough.map(|&level| self.axes.reach.level(level - kind.units)).collect();
                }
            }
            work = self.work();
            if work <= detail.max_work || (tried.len() == 0 && max_levels <= tables::MIN_DEVICE_LEVELS) {
                break;
            }
        }
        self.place_buckets(links, detail, has_rooms, work)
    }

    /// Finds the adjacencies of all buckets, in all placement cases if `has_rooms` and the work limit allows. Returns the
    /// lookups of one table, which were `work` in a single case.
    fn place_buckets(&mut self, links: &Links, detail: Resolution, has_rooms: bool, mut work: f64) -> f64 {
        let cases = links.widest as usize + 2;
        let rise = (1 + cases / 2) as f64;
        if has_rooms
            && links.machines > 1
            && work * rise <= detail.max_work
            && self.axes.reach.entries * cases <= tables::MAX_ENTRIES
        {
            self.placement_cases = cases;
            work *= rise;
        }
        let mut splits = std::mem::take(&mut self.splits);
        for split in &mut splits {
            let each_s = layers_s(self.task, &self.task.totals[split.share as usize]);
            let times = each_s.iter().zip(&self.min_s).filter(|(_, min_s)| **min_s > 0.0);
            split.slower = times.map(|(each_s, min_s)| each_s / min_s).reduce(f64::min).unwrap_or(1.0);
            split.ways = split.ways(links, self.placement_cases);
            for (way, kind) in split.ways.iter().flat_map(|way| split.kinds.iter().map(move |kind| (way, kind))) {
                let (rate, speed) = (way.sync, self.summing(kind));
                let is_it = |known: &(Rate, f64)| known.0 == rate && known.1.total_cmp(&speed).is_eq();
                let at = split.rates.iter().position(is_it).unwrap_or(split.rates.len());
                if at == split.rates.len() {
                    split.rates.push((rate, speed));
                }
                split.rate_of.push(at);
            }
        }
        self.splits = splits;
        work
    }

    /// Estimates the lookups of one table: pairs of a stage and a number of devices in front of it.
    pub(super) fn work(&self) -> f64 {
        let (model, groups) = (self.task.model, &self.axes.groups.cuts);
        let every = (groups.len().pow(2) / 2 * self.splits.len()).div_ceil(tables::WORK_SAMPLE).max(1);
        let mut work = 0;
        for to in (1..groups.len()).rev().step_by(every) {
            let (lowest, highest) = self.axes.reach.of_group[to];
            let end = groups[to][0];
            for split in &self.splits {
                let totals = &self.task.totals[split.share as usize];
                for kind in split.kinds.iter().filter(|kind| kind.first.max(lowest) <= highest) {
                    for from in (0..to).rev() {
                        let begin = groups[from][groups[from].len() - 1];
                        if self.is_short(totals, kind.speed, begin, end) {
                            let needed = kind.with_rest(self.axes.reach.of_group[from].0);
                            work += (highest + 1).saturating_sub(needed.max(lowest));
                        } else if model.is_chain {
                            break;
                        }
                    }
                }
            }
        }
        // Each split looks at each stage, too.
        (work * every + model.pairs() * self.splits.len()) as f64
    }

    /// Returns whether a stage works for less than the threshold by itself.
    pub(super) fn is_short(&self, totals: &Totals, speed: f64, begin: usize, end: usize) -> bool {
        let forwards = if self.task.recompute { 2.0 } else { 1.0 };
        let work_s = forwards * (totals.forward_s[end] - totals.forward_s[begin])
            + (totals.backward_s[end] - totals.backward_s[begin]);
        f64::from(self.task.micro_batches) * work_s < self.threshold_s * speed
    }

    /// Returns the axes of tables with about `most` groups of cuts and at most `max_levels` levels of devices.
    pub(super) fn grouped(&self, most: usize, max_levels: u32) -> TableAxes {
        let model = self.task.model;
        let groups = CutGroups::new(model, &self.work_s, most);
        let below_s = &self.min_below_s;
        let whole_s = below_s[below_s.len() - 1];
        let max_below_s = |cuts: &Vec<usize>| cuts.iter().map(|&cut| below_s[cut]).fold(0.0, f64::max);
        let behind = |&cut: &usize| model.layers_below(model.cuts() - 1) - model.layers_below(cut);
        TableAxes {
            reach: DeviceLevels::new(self.task, &self.units, &groups, &self.work_s, self.threshold_s, max_levels),
            behind_s: groups.cuts.iter().map(|cuts| whole_s - max_below_s(cuts)).collect(),
            layers_behind: groups.cuts.iter().map(|cuts| cuts.iter().map(behind).max().unwrap_or(0)).collect(),
            groups,
        }
    }

    /// Returns the speed of the backwards that an all-reduce overlaps. In a branching model, and where there is a
    /// single class, it is the slowest speed, which hides most of the all-reduce.
    pub(super) fn summing(&self, kind: &BucketUsage) -> f64 {
        let is_own = self.task.model.is_chain && self.kinds.len() > 1;
        if is_own { kind.speed } else { self.slowest }
    }

    /// Returns whether memory decides: whether some stage fits with one stage behind it, but not with `behind`.
    pub(super) fn is_tight(&self, behind: u32) -> bool {
        let task = self.task;
        let max_in_flight = |behind: u32| task.settings.max_in_flights(behind + 1, task.micro_batches).0;
        let micro_batches = f64::from(task.micro_batches);
        let every = (task.model.pairs() * self.splits.len()).div_ceil(tables::WORK_SAMPLE).max(1);
        self.splits.iter().any(|split| {
            let totals = &task.totals[split.share as usize];
            (1..task.model.cuts()).step_by(every).any(|end| {
                task.model.begins(end).any(|begin| {
                    let begin = begin as usize;
                    let work_s = totals.forward_s[end] - totals.forward_s[begin] + totals.backward_s[end]
                        - totals.backward_s[begin];
                    let bytes = |max_in_flight| {
                        let memory = &task.settings.memory;
                        cost::memory(
                            task.model,
                            totals,
                            memory,
                            (begin, end),
                            split.most,
                            max_in_flight,
                            task.recompute,
                        )
                        .total_bytes()
                    };
                    split.kinds.iter().any(|kind| {
                        micro_batches * work_s < self.threshold_s * kind.speed
                            && bytes(max_in_flight(1)) <= kind.memory_bytes
                            && bytes(max_in_flight(behind)) > kind.memory_bytes
                    })
                })
            })
        })
    }
}
