//! Resolution of the tables: the groups of cuts, buckets of replica counts and levels of devices that the work limit
//! allows.
//!
//! A coarser table gives a weaker bound, never a wrong one.

use super::builder::TableBuilder;
use super::device_levels::DeviceLevels;
use super::layers_s;
use super::replica_buckets::{BucketUsage, ReplicaBucket};
use crate::cost::Totals;
use crate::cost::network::Rate;
use crate::planner::effort::tables::{self, Resolution};
use crate::planner::hybrid::bounds::{cut_groups::CutGroups, link_bounds::Links};
use std::sync::Arc;

/// Axes of the tables: groups of cuts and levels of devices, each pair of which has an entry.
#[derive(Default)]
pub(super) struct TableAxes {
    pub(super) groups: CutGroups,
    pub(super) device_levels: DeviceLevels,
    /// Shortest time of a micro-batch behind any cut of each group, at speed 1.
    pub(super) behind_s: Vec<f64>,
    /// Largest number of layers behind any cut of each group. No more stages than layers are behind it.
    pub(super) layers_behind: Vec<usize>,
}

impl TableBuilder<'_> {
    /// Chooses replica buckets, groups of cuts, levels of devices and placement cases. Returns the number of lookups of
    /// one table.
    pub(super) fn choose_resolution(
        &mut self,
        links: &Links,
        resolution: Resolution,
        has_placement_cases: bool,
    ) -> f64 {
        // Estimate the loss of each combination. A plan has hardly more stages than micro-batches. Each stage loses up
        // to one group of cuts, and on average half of the range of replicas that its bucket joins.
        let stages = f64::from(self.task.micro_batches.min(tables::ASSUMED_STAGES));
        let cuts = self.task.model.cuts();
        let mut combinations: Vec<(f64, usize, f64)> = std::iter::once(cuts.min(resolution.max_cut_groups))
            .chain(tables::CUT_GROUP_COUNTS)
            .filter(|&max_groups| max_groups <= cuts.min(resolution.max_cut_groups))
            .map(|max_groups| (if max_groups < cuts { stages / max_groups as f64 } else { 0.0 }, max_groups))
            .flat_map(|(lost, max_groups)| {
                tables::REPLICA_RATIOS.map(|max_ratio| (lost + (max_ratio - 1.0) / 2.0, max_groups, max_ratio))
            })
            .collect();
        combinations.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut combinations = combinations.into_iter();
        let mut max_levels = tables::MAX_DEVICE_LEVELS;
        let mut known: Vec<Arc<TableAxes>> = Vec::new();
        let mut work;
        loop {
            if let Some((_, max_groups, max_ratio)) = combinations.next() {
                let axes = known.iter().find(|known| known.groups.max_groups == max_groups).cloned();
                self.axes = axes.unwrap_or_else(|| {
                    known.push(Arc::new(self.axes_with(max_groups, max_levels)));
                    known[known.len() - 1].clone()
                });
                self.buckets = ReplicaBucket::all(self.task, &self.classes, max_ratio);
            } else {
                // The coarsest combination is still too much work, so only fewer levels are left to try.
                max_levels /= 2;
                self.axes = Arc::new(self.axes_with(self.axes.groups.max_groups, max_levels));
            }
            for bucket in &mut self.buckets {
                let levels = &self.axes.device_levels.levels;
                for usage in &mut bucket.usages {
                    usage.first_level = levels.partition_point(|&level| level < usage.units);
                    let possible = levels[usage.first_level..].iter();
                    usage.levels_left =
                        possible.map(|&level| self.axes.device_levels.level(level - usage.units)).collect();
                }
            }
            work = self.work();
            if work <= resolution.max_work || (combinations.len() == 0 && max_levels <= tables::MIN_DEVICE_LEVELS) {
                break;
            }
        }
        self.place_buckets(links, resolution, has_placement_cases, work)
    }

    /// Finds the adjacencies of all buckets, in all placement cases if `has_placement_cases` and the work limit allows.
    /// Returns the number of lookups of one table, which is `work` for a single case.
    fn place_buckets(
        &mut self,
        links: &Links,
        resolution: Resolution,
        has_placement_cases: bool,
        mut work: f64,
    ) -> f64 {
        let cases = links.widest as usize + 2;
        // A stage of n devices fits only the cases with n free devices or more. On average this is half of them.
        let rise = (1 + cases / 2) as f64;
        if has_placement_cases
            && links.nodes > 1
            && work * rise <= resolution.max_work
            && self.axes.device_levels.entries * cases <= tables::MAX_ENTRIES
        {
            self.placement_cases = cases;
            work *= rise;
        }
        let mut buckets = std::mem::take(&mut self.buckets);
        for bucket in &mut buckets {
            let each_s = layers_s(self.task, bucket.totals(self.task));
            let times = each_s.iter().zip(&self.min_s).filter(|(_, min_s)| **min_s > 0.0);
            bucket.min_slowdown = times.map(|(each_s, min_s)| each_s / min_s).reduce(f64::min).unwrap_or(1.0);
            bucket.adjacencies = bucket.find_adjacencies(links, self.placement_cases);
            // Many adjacencies have the same all-reduce rate. Number the distinct ones, so that each exposed all-reduce
            // is computed once.
            let pairs = bucket.adjacencies.iter().flat_map(|one| bucket.usages.iter().map(move |usage| (one, usage)));
            for (adjacency, usage) in pairs {
                let (rate, speed) = (adjacency.sync, self.overlapped_speed(usage));
                let is_it = |known: &(Rate, f64)| known.0 == rate && known.1.total_cmp(&speed).is_eq();
                let at = bucket.rates.iter().position(is_it).unwrap_or(bucket.rates.len());
                if at == bucket.rates.len() {
                    bucket.rates.push((rate, speed));
                }
                bucket.rate_index.push(at);
            }
        }
        self.buckets = buckets;
        work
    }

    /// Estimates the lookups of one table: pairs of a stage and a number of devices in front of it.
    pub(super) fn work(&self) -> f64 {
        let (model, groups) = (self.task.model, &self.axes.groups.cuts);
        // Every n-th group suffices for an estimate, and keeps it much cheaper than the table.
        let every = (groups.len().pow(2) / 2 * self.buckets.len()).div_ceil(tables::WORK_SAMPLE).max(1);
        let mut work = 0;
        for to in (1..groups.len()).rev().step_by(every) {
            let (lowest, highest) = self.axes.device_levels.of_group[to];
            let end = groups[to][0];
            for bucket in &self.buckets {
                let totals = bucket.totals(self.task);
                for usage in bucket.usages.iter().filter(|usage| usage.first_level.max(lowest) <= highest) {
                    for from in (0..to).rev() {
                        let begin = groups[from][groups[from].len() - 1];
                        if self.is_short(totals, usage.speed, begin, end) {
                            let needed = usage.level_leaving(self.axes.device_levels.of_group[from].0);
                            work += (highest + 1).saturating_sub(needed.max(lowest));
                        } else if model.is_chain {
                            break; // In a chain, stages that begin earlier take longer.
                        }
                    }
                }
            }
        }
        // Each bucket also evaluates each stage once, for all levels together.
        (work * every + model.pairs() * self.buckets.len()) as f64
    }

    /// Returns whether a stage works for less than the threshold by itself. `totals` has the sums for its samples.
    pub(super) fn is_short(&self, totals: &Totals, speed: f64, begin: usize, end: usize) -> bool {
        let forwards = self.task.recompute.min_forwards();
        let work_s = forwards * (totals.forward_s[end] - totals.forward_s[begin])
            + (totals.backward_s[end] - totals.backward_s[begin]);
        f64::from(self.task.micro_batches) * work_s < self.threshold_s * speed
    }

    /// Returns the axes of tables with about `max_groups` groups of cuts and at most `max_levels` levels of devices.
    pub(super) fn axes_with(&self, max_groups: usize, max_levels: u32) -> TableAxes {
        let model = self.task.model;
        let groups = CutGroups::new(model, &self.work_s, max_groups);
        let below_s = &self.min_below_s;
        let whole_s = below_s[below_s.len() - 1];
        let max_below_s = |cuts: &Vec<usize>| cuts.iter().map(|&cut| below_s[cut]).fold(0.0, f64::max);
        let behind = |&cut: &usize| model.layers_below(model.cuts() - 1) - model.layers_below(cut);
        TableAxes {
            device_levels: DeviceLevels::new(
                self.task,
                &self.units,
                &groups,
                &self.work_s,
                self.threshold_s,
                max_levels,
            ),
            behind_s: groups.cuts.iter().map(|cuts| whole_s - max_below_s(cuts)).collect(),
            layers_behind: groups.cuts.iter().map(|cuts| cuts.iter().map(behind).max().unwrap_or(0)).collect(),
            groups,
        }
    }

    /// Returns the speed of the backwards that an all-reduce overlaps.
    ///
    /// In a branching model, and if there is a single class, it is the lowest speed of all devices.
    pub(super) fn overlapped_speed(&self, usage: &BucketUsage) -> f64 {
        // Slow backwards hide most of an all-reduce, so the lowest speed gives a lower bound for all devices of a
        // single class. In a branching model it keeps the sums, which take long to find, down to one for each rate.
        let is_own = self.task.model.is_chain && self.classes.len() > 1;
        if is_own { usage.speed } else { self.min_speed }
    }

    /// Returns whether memory distinguishes the tables: whether some stage fits with one stage behind it, but not with
    /// `behind` stages behind it.
    pub(super) fn is_tight(&self, behind: u32) -> bool {
        let task = self.task;
        let max_in_flight = |behind: u32| task.settings.max_in_flights(behind + 1, task.micro_batches).0;
        let micro_batches = f64::from(task.micro_batches);
        let every = (task.model.pairs() * self.buckets.len()).div_ceil(tables::WORK_SAMPLE).max(1);
        self.buckets.iter().any(|bucket| {
            let totals = bucket.totals(task);
            (1..task.model.cuts()).step_by(every).any(|end| {
                task.model.begins(end).any(|begin| {
                    let begin = begin as usize;
                    let work_s = totals.forward_s[end] - totals.forward_s[begin] + totals.backward_s[end]
                        - totals.backward_s[begin];
                    let memory = task.memory(totals, (begin, end), bucket.max_replicas);
                    let is_between = |number| (max_in_flight(1)..max_in_flight(behind)).contains(&number);
                    bucket.usages.iter().any(|usage| {
                        micro_batches * work_s < self.threshold_s * usage.speed && {
                            let fitting = memory.fitting(max_in_flight(behind), usage.memory_bytes);
                            is_between(fitting.kept) || is_between(fitting.recomputed)
                        }
                    })
                })
            })
        })
    }
}
