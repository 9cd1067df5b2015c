//! Improves a plan by moving borders between stages and devices between groups.
//!
//! Moves are simulated one after another, and a move stays if it lowers the score. If no move helps, schedules that are
//! fitted to times are fitted again. If that does not help either, a few random moves kick the best plan out of its
//! local optimum. Effort is counted in actions, and the random numbers have a fixed seed, so the result is the same on
//! every machine.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{Settings, StageCost};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::control::Control;
use crate::cost::network::Cluster;
use crate::cost::{LayerSums, Pace, Totals};
use crate::error::Result;
use crate::schedule::{Family, Request, Schedule};
use crate::simulate::Sweep;

use super::SimulatedPlan;
use super::run::{CostCache, Peaks, Run, SMALLER, durations, run};
use super::shapes::{Shape, balanced};

/// A candidate plan of a shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Attempt {
    /// Positions in the line of cuts around each stage.
    ends: Vec<usize>,
    /// Devices of each group.
    replicas: Vec<u32>,
}

/// A change of an attempt.
#[derive(Debug, Clone, Copy)]
enum Move {
    /// Moves all borders from the one behind stage `.0` to the one behind stage `.1` by `.2` positions.
    Borders(usize, usize, isize),
    /// Moves the border behind stage `.0` by `.2` positions and the one behind `.1` back by the same number.
    Swap(usize, usize, isize),
    /// Moves a device from one group to another. `None` stands for the idle devices.
    Device(Option<usize>, Option<usize>),
}

/// Local search over the cuts and groups of one shape.
pub(super) struct Improver<'a> {
    asked: (&'a LayerSums, &'a Cluster, &'a Settings),
    row: &'a [usize],
    family: &'static Family,
    shape: Shape,
    schedule: Schedule,
    peaks: Peaks,
    cost_cache: CostCache<'a>,
    /// Devices of the groups for which `cost_cache` holds costs.
    replicas: Vec<u32>,
    sweep: Sweep,
    /// Sums over the layers, by samples of a replica.
    totals_of: FxHashMap<u32, Totals>,
    /// Scores of attempts that were run in `schedule`. `None` if an attempt can't be run.
    known: FxHashMap<Attempt, Option<f64>>,
    /// Attempts to which schedules were fitted without success.
    fitted: FxHashSet<Attempt>,
    now: (Attempt, f64),
    best: Best,
    random: u64,
    kicks: u32,
    moves: Vec<Move>,
    pub(super) simulated: u64,
}

/// The best attempt so far, with its schedules and its run.
struct Best {
    attempt: Attempt,
    schedule: Schedule,
    run: Run,
}

impl<'a> Improver<'a> {
    /// Simulates balanced cuts of a shape. `None` if the family does not allow the shape, if its devices can't share
    /// the micro-batch, or if `control` has stopped.
    pub(super) fn start(
        asked: (&'a LayerSums, &'a Cluster, &'a Settings),
        row: &'a [usize],
        family: &'static Family,
        shape: Shape,
        control: &Control,
    ) -> Option<Self> {
        if control.should_stop() {
            return None;
        }
        let (_, cluster, settings) = asked;
        let request = Request {
            virtual_stages_per_rank: Some(shape.virtual_stages_per_rank),
            ..Request::new(shape.replicas.len() as u32, settings.global_batch / shape.micro_batch)
        };
        let is_fitted = family.options.contains(&"durations");
        // Orders that are fitted to times are built twice. The first time they only show which rank runs which stage,
        // for which a few micro-batches are enough.
        let few = Request { micro_batches: request.micro_batches.min(2 * request.ranks), ..request.clone() };
        let schedule = family.build_under(if is_fitted { &few } else { &request }, control).ok()?;
        let mut totals_of = FxHashMap::default();
        let ends = balanced_ends(asked, row, &schedule.rank_of_stage, &shape, &shape.replicas, &mut totals_of)?;
        let attempt = Attempt { ends, replicas: shape.replicas.clone() };
        let footprints = footprints(cluster, &shape, &attempt.replicas);
        let recompute = vec![shape.recompute; schedule.rank_of_stage.len()];
        let mut cost_cache = CostCache::new(asked, shape.micro_batch, recompute, &schedule.rank_of_stage, footprints);
        let cuts: Vec<usize> = attempt.ends.iter().map(|&end| row[end]).collect();
        let stages = cost_cache.of(&cuts).ok()?;
        let schedule = if is_fitted {
            let durations = Some(durations(&stages, &schedule.rank_of_stage));
            family.build_under(&Request { durations, ..request }, control).ok()?
        } else {
            schedule
        };
        let peaks = Peaks::of(&schedule);
        let mut sweep = Sweep::default();
        let run = run(&schedule, &peaks, stages, &mut sweep).ok()?;
        let moves = moves(&schedule, cluster, settings);
        Some(Self {
            asked,
            row,
            family,
            peaks,
            cost_cache,
            replicas: attempt.replicas.clone(),
            sweep,
            totals_of,
            known: FxHashMap::default(),
            fitted: FxHashSet::default(),
            now: (attempt.clone(), run.score()),
            best: Best { attempt, schedule: schedule.clone(), run },
            schedule,
            shape,
            random: 0x9E37_79B9_7F4A_7C15,
            kicks: 0,
            moves,
            simulated: 1,
        })
    }

    /// Returns whether the shape is tried on small clusters only.
    pub(super) fn is_extra(&self) -> bool {
        self.shape.is_extra
    }

    /// Returns the run of the best plan so far. It fits if any plan did.
    pub(super) fn best(&self) -> &Run {
        &self.best.run
    }

    /// Continues the search until its attempts had `effort` actions, nothing helps any more, or `control` has stopped.
    pub(super) fn improve(&mut self, effort: u64, control: &Control) {
        let mut each = self.schedule.action_count() as u64 + effort::ATTEMPT_OVERHEAD;
        // Fitting an order takes as long as this number of attempts.
        if self.fits_each() {
            each *= effort::FITTING_ATTEMPTS;
        }
        let mut left = effort;
        if self.kicks == 0 {
            self.try_all(each, &mut left, control);
        }
        while self.kicks <= effort::MAX_KICKS && left >= each && !control.should_stop() {
            let before = self.best.run.score();
            loop {
                self.descend(each, &mut left, control);
                if !self.fit(each, &mut left, control) {
                    break;
                }
            }
            // A kick that led to a better plan resets the count, so the search ends only after many failures in a row.
            if self.best.run.score() < before * (1.0 - SMALLER) {
                self.kicks = 0;
            }
            self.now = (self.best.attempt.clone(), self.best.run.score());
            // Scores are comparable only under the same schedules.
            if !self.fits_each() && self.schedule != self.best.schedule {
                self.run_in(self.best.schedule.clone());
            }
            self.kick();
            self.kicks += 1;
        }
    }

    /// Tries all cuts for the initial groups, if there are few enough.
    fn try_all(&mut self, each: u64, left: &mut u64, control: &Control) {
        let (places, borders) = (self.row.len() - 2, self.best.attempt.ends.len() - 2);
        // The binomial coefficient: ways to choose the borders among the positions.
        let ways = (0..borders).fold(1.0, |ways, at| ways * (places - at) as f64 / (at + 1) as f64);
        if ways > effort::ALL_CUTS || ways * each as f64 > *left as f64 {
            return;
        }
        let mut attempt = Attempt { ends: (0..=borders).collect(), replicas: self.shape.replicas.clone() };
        attempt.ends.push(places + 1);
        while !control.should_stop() {
            self.score(&attempt);
            *left = left.saturating_sub(each);
            // The next cuts in order: the last border that still can moves on, those behind it stand right behind it.
            // The next combination in lexicographic order: the last border that can move moves by one, and all borders
            // behind it follow directly.
            let Some(at) = (1..=borders).rev().find(|&at| attempt.ends[at] < places + at - borders) else { break };
            attempt.ends[at] += 1;
            for behind in at + 1..=borders {
                attempt.ends[behind] = attempt.ends[behind - 1] + 1;
            }
        }
    }

    /// Returns whether schedules are fitted to each attempt: if they depend on times, and have few actions.
    fn fits_each(&self) -> bool {
        self.family.options.contains(&"durations") && self.schedule.action_count() <= effort::FITTED_ACTIONS
    }

    /// Applies moves until none of them lowers the score.
    fn descend(&mut self, each: u64, left: &mut u64, control: &Control) {
        let moves = std::mem::take(&mut self.moves);
        let offset = self.next(moves.len());
        // The search starts at a random move and ends after a full turn without success.
        let (mut at, mut fruitless) = (0, 0);
        while fruitless < moves.len() && *left >= each && !control.should_stop() {
            let change = moves[(offset + at) % moves.len()];
            at += 1;
            fruitless += 1;
            for attempt in self.changed(change) {
                if !self.known.contains_key(&attempt) {
                    *left = left.saturating_sub(each);
                }
                let Some(score) = self.score(&attempt) else { continue };
                if score < self.now.1 * (1.0 - SMALLER) {
                    self.now = (attempt, score);
                    fruitless = 0;
                    at -= 1; // try the same move again, since it may help repeatedly
                    break;
                }
            }
        }
        self.moves = moves;
    }

    /// Returns the score of an attempt, or `None` if it can't be run.
    fn score(&mut self, attempt: &Attempt) -> Option<f64> {
        if let Some(&score) = self.known.get(attempt) {
            return score;
        }
        let score = self.simulate(attempt);
        // Forgetting everything bounds the memory, and costs only repeated simulations.
        if self.known.len() >= effort::REMEMBERED_ATTEMPTS {
            self.known.clear();
        }
        self.known.insert(attempt.clone(), score);
        score
    }

    /// Runs an attempt, and stores it if it is the best.
    fn simulate(&mut self, attempt: &Attempt) -> Option<f64> {
        let (_, _, settings) = self.asked;
        if attempt
            .replicas
            .iter()
            .any(|&replicas| settings.samples_per_replica(self.shape.micro_batch, replicas).is_none())
        {
            return None;
        }
        let stages = self.stages(attempt).ok()?;
        if self.fits_each() {
            // No deadline here: building such a small order takes no time, and a failure would count as a bad attempt.
            let fitted = self.fitted_to(&stages, &Control::default()).ok()?;
            self.peaks = Peaks::of(&fitted);
            self.schedule = fitted;
        }
        let found = run(&self.schedule, &self.peaks, stages, &mut self.sweep).ok()?;
        self.simulated += 1;
        let score = found.score();
        if found.is_better_than(&self.best.run) {
            self.best = Best { attempt: attempt.clone(), schedule: self.schedule.clone(), run: found };
        }
        Some(score)
    }

    /// Fits schedules to the current plan if they depend on times. Returns whether that lowered its score.
    fn fit(&mut self, each: u64, left: &mut u64, control: &Control) -> bool {
        let looks = self.family.options.contains(&"durations") && !self.fits_each();
        if !looks || *left < effort::FITTING_ATTEMPTS * each || !self.fitted.insert(self.now.0.clone()) {
            return false;
        }
        *left -= effort::FITTING_ATTEMPTS * each;
        let (attempt, score) = self.now.clone();
        let Ok(stages) = self.stages(&attempt) else { return false };
        let Ok(fitted) = self.fitted_to(&stages, control) else { return false };
        if fitted == self.schedule {
            return false;
        }
        // Fitted schedules are not always better, so they are undone unless the score falls.
        let before = self.run_in(fitted);
        let Some(score) = self.score(&attempt).filter(|fitted| *fitted < score * (1.0 - SMALLER)) else {
            self.run_in(before);
            return false;
        };
        self.now.1 = score;
        true
    }

    /// Fits schedules to the best plan once more, since the effort may have ended before that.
    pub(super) fn finish(&mut self, control: &Control) {
        if self.fits_each() || !self.family.options.contains(&"durations") {
            return;
        }
        let attempt = self.best.attempt.clone();
        let Ok(stages) = self.stages(&attempt) else { return };
        if let Ok(fitted) = self.fitted_to(&stages, control) {
            self.run_in(fitted);
            self.score(&attempt);
        }
    }

    /// Returns schedules that are fitted to the times of these stages.
    fn fitted_to(&self, stages: &[StageCost], control: &Control) -> Result<Schedule> {
        let request = Request {
            virtual_stages_per_rank: Some(self.shape.virtual_stages_per_rank),
            durations: Some(durations(stages, &self.schedule.rank_of_stage)),
            ..Request::new(self.shape.replicas.len() as u32, self.asked.2.global_batch / self.shape.micro_batch)
        };
        self.family.build_under(&request, control)
    }

    /// Runs attempts in other schedules from now on. Returns the previous orders.
    fn run_in(&mut self, schedule: Schedule) -> Schedule {
        self.peaks = Peaks::of(&schedule);
        // All cached results hold for the previous schedules only.
        self.known.clear();
        self.fitted.clear();
        std::mem::replace(&mut self.schedule, schedule)
    }

    /// Evaluates the stages of an attempt.
    fn stages(&mut self, attempt: &Attempt) -> Result<Vec<StageCost>> {
        if attempt.replicas != self.replicas {
            self.cost_cache.regroup(footprints(self.asked.1, &self.shape, &attempt.replicas));
            self.replicas.clone_from(&attempt.replicas);
        }
        let cuts: Vec<usize> = attempt.ends.iter().map(|&end| self.row[end]).collect();
        self.cost_cache.of(&cuts)
    }

    /// Changes the current plan by a few random moves, or moves one border to a random position, even if the score
    /// rises.
    fn kick(&mut self) {
        if self.kicks.is_multiple_of(2) {
            for _ in 0..2 + self.next(3) {
                let at = self.next(self.moves.len());
                if let Some(attempt) = self.changed(self.moves[at]).into_iter().next() {
                    self.now.0 = attempt;
                }
            }
        } else {
            let at = 1 + self.next(self.now.0.ends.len() - 2);
            let (begin, end) = (self.now.0.ends[at - 1], self.now.0.ends[at + 1]);
            self.now.0.ends[at] = begin + 1 + self.next(end - begin - 1);
        }
        let attempt = self.now.0.clone();
        self.now.1 = self.score(&attempt).unwrap_or(f64::INFINITY);
    }

    /// Returns the current plan with a change, if that is valid. If groups change, also the same groups with balanced
    /// cuts.
    fn changed(&mut self, change: Move) -> Vec<Attempt> {
        let mut attempt = self.now.0.clone();
        let moved = |ends: &mut [usize], at: usize, by: isize| {
            ends[at] = ends[at].saturating_add_signed(by);
        };
        match change {
            Move::Borders(first, last, by) => (first..=last).for_each(|at| moved(&mut attempt.ends, at + 1, by)),
            Move::Swap(one, other, by) => {
                moved(&mut attempt.ends, one + 1, by);
                moved(&mut attempt.ends, other + 1, -by);
            }
            Move::Device(from, to) => {
                let is_busy = attempt.replicas.iter().sum::<u32>() as usize == self.shape.line.len();
                // The last device of a group can't leave it, and an idle device must exist to join one.
                if from.map_or(is_busy, |from| attempt.replicas[from] == 1) {
                    return Vec::new();
                }
                if let Some(from) = from {
                    attempt.replicas[from] -= 1;
                }
                if let Some(to) = to {
                    attempt.replicas[to] += 1;
                }
                // With other devices the old cuts may be far from balanced, so both variants compete.
                let ranks = &self.schedule.rank_of_stage;
                let totals_of = &mut self.totals_of;
                let ends = balanced_ends(self.asked, self.row, ranks, &self.shape, &attempt.replicas, totals_of);
                let rebalanced = ends.map(|ends| Attempt { ends, replicas: attempt.replicas.clone() });
                return std::iter::once(attempt).chain(rebalanced).collect();
            }
        }
        let inside = attempt.ends[0] == 0 && attempt.ends[attempt.ends.len() - 1] == self.row.len() - 1;
        if inside && attempt.ends.windows(2).all(|two| two[0] < two[1]) { vec![attempt] } else { Vec::new() }
    }

    /// Returns a number below `below` from a generator with a fixed seed (xorshift, Marsaglia, 2003).
    fn next(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize % below
    }

    /// Converts the best plan so far to a result.
    pub(super) fn into_plan(self) -> SimulatedPlan {
        let groups = groups(&self.shape.line, &self.best.attempt.replicas);
        SimulatedPlan {
            micro_batch: self.shape.micro_batch,
            ends: self.best.attempt.ends.windows(2).map(|two| (self.row[two[0]], self.row[two[1]])).collect(),
            devices: self.best.schedule.rank_of_stage.iter().map(|&rank| groups[rank as usize].clone()).collect(),
            schedule: self.best.schedule,
            run: self.best.run,
        }
    }
}

/// Returns the devices of each group: the next ones of `line` for each.
fn groups(line: &[u32], replicas: &[u32]) -> Vec<Vec<u32>> {
    let mut begin = 0;
    let group = |&count: &u32| {
        let mut devices = line[begin..begin + count as usize].to_vec();
        devices.sort_unstable();
        begin += count as usize;
        devices
    };
    replicas.iter().map(group).collect()
}

/// Returns the numbers of devices by node of each group.
fn footprints(cluster: &Cluster, shape: &Shape, replicas: &[u32]) -> Vec<Vec<(u32, u32)>> {
    groups(&shape.line, replicas).iter().map(|devices| cluster.footprint(devices)).collect()
}

/// Returns balanced cuts for groups with these numbers of devices, or `None` if a group can't share the micro-batch.
fn balanced_ends(
    (model, cluster, settings): (&LayerSums, &Cluster, &Settings),
    row: &[usize],
    rank_of_stage: &[u32],
    shape: &Shape,
    replicas: &[u32],
    totals_of: &mut FxHashMap<u32, Totals>,
) -> Option<Vec<usize>> {
    let mut of_rank: Vec<Vec<f64>> = Vec::with_capacity(replicas.len());
    for (devices, &count) in groups(&shape.line, replicas).iter().zip(replicas) {
        let samples_per_replica = settings.samples_per_replica(shape.micro_batch, count)?;
        let totals = totals_of.entry(samples_per_replica).or_insert_with(|| model.totals(samples_per_replica));
        let pace = (cluster.footprint(devices).iter())
            .fold(Pace::NONE, |pace, &(node, _)| pace.with(&cluster.nodes[node as usize]));
        let below_s = |&cut: &usize| {
            let (forward_s, backward_s) = totals.longest_s(pace, (0, cut));
            forward_s + backward_s
        };
        of_rank.push(row.iter().map(below_s).collect());
    }
    let before: Vec<&[f64]> = rank_of_stage.iter().map(|&rank| &of_rank[rank as usize][..]).collect();
    Some(balanced(&before))
}

/// Returns all moves that are tried, small ones first.
fn moves(schedule: &Schedule, cluster: &Cluster, settings: &Settings) -> Vec<Move> {
    let borders = schedule.rank_of_stage.len() - 1;
    let mut moves = Vec::new();
    for by in effort::STRIDES {
        moves.extend((0..borders).map(|at| Move::Borders(at, at, by)));
    }
    // A bottleneck may be a run of stages: moving one border only shifts the load to the neighbor.
    for by in [1, -1] {
        for first in 0..borders {
            moves.extend((first + 1..borders).map(|last| Move::Borders(first, last, by)));
            moves.extend((first + 1..borders).map(|other| Move::Swap(first, other, by)));
        }
    }
    let devices = cluster.devices();
    // Each move of a device changes the costs of all stages, so on large clusters groups stay as they are.
    if !settings.equal_replicas && devices <= effort::MAX_MOVING_DEVICES && devices > schedule.ranks() {
        let groups = || (0..schedule.ranks() as usize).map(Some);
        for from in groups().chain([None]) {
            moves.extend(groups().chain([None]).filter(|&to| to != from).map(|to| Move::Device(from, to)));
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_take_the_next_devices_in_line() {
        assert_eq!(groups(&[0, 2, 1, 3, 4], &[2, 2]), [vec![0, 2], vec![1, 3]]);
    }
}
