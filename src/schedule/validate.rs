//! Validation of a schedule: complete, each action once and on its rank, after its inputs, and without a deadlock.

use super::{Action, Kind, Schedule};
use crate::error::{Error, Result};

const FORWARD: u8 = 1;
const INPUT: u8 = 2;
const WEIGHT: u8 = 4;

/// Returns the marks of the passes that an action completes. A whole backward completes both gradients.
const fn mark(kind: Kind) -> u8 {
    match kind {
        Kind::Forward => FORWARD,
        Kind::Backward => INPUT | WEIGHT,
        Kind::InputGradient => INPUT,
        // Callers split an overlapped pair into its two passes first.
        Kind::WeightGradient => WEIGHT,
        Kind::Overlapped => 0,
    }
}

/// Passes that are done, for each stage and micro-batch.
struct Done<'a> {
    schedule: &'a Schedule,
    marks: Vec<u8>,
    width: usize,
}

impl<'a> Done<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let width = schedule.micro_batches.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        Self { schedule, marks: vec![0; width * schedule.rank_of_stage.len()], width }
    }

    fn index(&self, stage: u32, micro_batch: u32) -> usize {
        // A chain's stages run only the micro-batches of the chain. Count from the first one to keep the table dense.
        let first = self.schedule.micro_batches[(stage / self.schedule.stages_per_pipeline) as usize].start;
        stage as usize * self.width + (micro_batch - first) as usize
    }

    fn of(&self, stage: u32, micro_batch: u32) -> u8 {
        self.marks[self.index(stage, micro_batch)]
    }

    fn set(&mut self, action: Action) {
        let index = self.index(action.stage, action.micro_batch);
        self.marks[index] |= mark(action.kind);
    }
}

impl Schedule {
    /// Checks that the schedule can run.
    ///
    /// ```
    /// use hpgo::schedule::one_f_one_b;
    ///
    /// let deadlock = one_f_one_b(&[1, 2], 2).validate().unwrap_err();
    /// assert_eq!(
    ///     deadlock.to_string(),
    ///     "deadlock: rank 0 waits before `0B0` for `1B0`, which rank 1 runs after `1F1`; \
    ///      rank 1 waits before `1F1` for `0F1`, which rank 0 runs after `0B0`"
    /// );
    /// ```
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first invalid action, a missing action, or the cycle of actions in a deadlock.
    pub fn validate(&self) -> Result<()> {
        // Each check relies on the ones before it: without them, indices below would be out of range.
        self.check_shape()?;
        self.check_each_rank()?;
        self.check_progress()
    }

    fn check_shape(&self) -> Result<()> {
        let stages = self.rank_of_stage.len();
        let chains = self.micro_batches.len();
        if stages == 0 || chains == 0 || stages != chains * self.stages_per_pipeline as usize {
            return Err(Error::schedule(
                format!("{stages} stages are not {chains} chain(s) of {} stages", self.stages_per_pipeline),
                "give every chain of stages the same length, and each stage a rank",
            ));
        }
        for (stage, &rank) in self.rank_of_stage.iter().enumerate() {
            if rank as usize >= self.action_lists.len() {
                return Err(Error::schedule(
                    format!("stage {stage} is on rank {rank}, but there are {} ranks", self.action_lists.len()),
                    "place every stage on a rank that has an order",
                ));
            }
        }
        let mut ranges = self.micro_batches.clone();
        ranges.sort_unstable_by_key(|range| range.start);
        if ranges.windows(2).any(|pair| pair[1].start < pair[0].end) {
            return Err(Error::schedule(
                "two chains share a micro-batch",
                "number micro-batches differently in each chain",
            ));
        }
        let due = ranges.iter().try_fold(0, |due, range| (range.start == due).then_some(range.end));
        if due.is_none() {
            return Err(Error::schedule(
                format!("micro-batches are numbered {ranges:?}"),
                "number them from 0 without a gap, over all chains",
            ));
        }
        // Check before the allocations below: one wrong number in a file may claim 2^32 micro-batches.
        let forwards = u64::from(self.stages_per_pipeline)
            * self.micro_batches.iter().map(|range| range.len() as u64).sum::<u64>();
        if forwards > self.action_count() as u64 {
            return Err(Error::schedule(
                format!("{forwards} forwards are due, but there are only {} actions", self.action_count()),
                "list a forward of every stage and micro-batch, and number micro-batches without a gap",
            ));
        }
        Ok(())
    }

    /// Checks that each action exists, is on its rank, comes once and after its own forward, and that none is missing.
    fn check_each_rank(&self) -> Result<()> {
        let mut done = Done::new(self);
        for (rank, order) in self.action_lists.iter().enumerate() {
            for &entry in order {
                // Both passes of a pair start together, so neither may need the other. Check both before marking them.
                for action in entry.halves() {
                    self.check_place(rank, action)?;
                    check_turn(rank, entry, action, done.of(action.stage, action.micro_batch))?;
                }
                entry.halves().for_each(|action| done.set(action));
            }
        }
        self.check_complete(&done)
    }

    fn check_place(&self, rank: usize, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let Some(&owner) = self.rank_of_stage.get(stage as usize) else {
            return Err(Error::schedule(
                format!("rank {rank} runs `{action}`, but there are only {} stages", self.rank_of_stage.len()),
                "number stages from 0",
            ));
        };
        let range = &self.micro_batches[(stage / self.stages_per_pipeline) as usize];
        if !range.contains(&micro_batch) {
            return Err(Error::schedule(
                format!(
                    "rank {rank} runs `{action}`, but micro-batches {}..{} run through stage {stage}",
                    range.start, range.end
                ),
                "number micro-batches from 0, as many as the schedule is for",
            ));
        }
        if owner as usize != rank {
            return Err(Error::schedule(
                format!("rank {rank} runs `{action}`, but stage {stage} is on rank {owner}"),
                format!("move it to rank {owner}, or place the stage elsewhere"),
            ));
        }
        Ok(())
    }

    fn check_complete(&self, done: &Done) -> Result<()> {
        let has_backward = done.marks.iter().any(|marks| marks & (INPUT | WEIGHT) != 0);
        let whole = if has_backward { FORWARD | INPUT | WEIGHT } else { FORWARD };
        for stage in 0..self.stages() {
            for micro_batch in self.micro_batches[(stage / self.stages_per_pipeline) as usize].clone() {
                let missing = whole & !done.of(stage, micro_batch);
                if missing != 0 {
                    // Report a missing forward first: adding only the backward would lead to the next error.
                    let kind = match missing {
                        FORWARD | 3 | 5 | 7 => Kind::Forward,
                        WEIGHT => Kind::WeightGradient,
                        INPUT => Kind::InputGradient,
                        _ => Kind::Backward,
                    };
                    let action = Action::new(kind, stage, micro_batch);
                    let rank = self.rank_of_stage[stage as usize];
                    return Err(Error::schedule(
                        format!("`{action}` is missing on rank {rank}"),
                        "list a forward and a backward (or I and W) of every stage and micro-batch",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Runs the actions in dependency order. If all remaining ranks wait for each other, returns an error with the
    /// cycle.
    fn check_progress(&self) -> Result<()> {
        let mut done = Done::new(self);
        let mut next = vec![0; self.action_lists.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for (order, next) in self.action_lists.iter().zip(&mut next) {
                // Which rank advances first does not matter: an action that can run stays runnable, so a deadlock shows
                // in every order.
                while let Some(&entry) = order.get(*next)
                    && self.awaited(&done, entry).is_none()
                {
                    entry.halves().for_each(|action| done.set(action));
                    *next += 1;
                    moved = true;
                }
            }
        }
        match (0..next.len()).find(|&rank| next[rank] < self.action_lists[rank].len()) {
            Some(stuck) => Err(self.deadlock(&done, &next, stuck)),
            None => Ok(()),
        }
    }

    /// Returns an action of another stage that `entry` needs and that isn't done, or `None`.
    fn awaited(&self, done: &Done, entry: Action) -> Option<Action> {
        entry.halves().find_map(|action| {
            let Action { kind, stage, micro_batch, .. } = action;
            let place = stage % self.stages_per_pipeline;
            match kind {
                Kind::Forward if place > 0 && done.of(stage - 1, micro_batch) & FORWARD == 0 => {
                    Some(Action::forward(stage - 1, micro_batch))
                }
                Kind::Backward | Kind::InputGradient
                    if place + 1 < self.stages_per_pipeline && done.of(stage + 1, micro_batch) & INPUT == 0 =>
                {
                    Some(Action::new(Kind::Backward, stage + 1, micro_batch))
                }
                _ => None,
            }
        })
    }

    fn deadlock(&self, done: &Done, next: &[usize], stuck: usize) -> Error {
        // Every waiting rank waits for exactly one other rank, so following them must reach a rank a second time. The
        // ranks before that one only wait for the cycle, and are left out of the message.
        let mut path = Vec::new();
        let mut rank = stuck;
        while !path.contains(&rank) {
            path.push(rank);
            let awaited =
                self.awaited(done, self.action_lists[rank][next[rank]]).expect("a stuck rank waits for something");
            rank = self.rank_of_stage[awaited.stage as usize] as usize;
        }
        let start = path.iter().position(|&seen| seen == rank).expect("the walk ended on a rank it had seen");
        let sentences: Vec<String> = path[start..]
            .iter()
            .map(|&rank| {
                let entry = self.action_lists[rank][next[rank]];
                let awaited = self.awaited(done, entry).expect("a stuck rank waits for something");
                let owner = self.rank_of_stage[awaited.stage as usize] as usize;
                let awaited = self.as_listed(owner, awaited);
                let gate = self.action_lists[owner][next[owner]];
                format!("rank {rank} waits before `{entry}` for `{awaited}`, which rank {owner} runs after `{gate}`")
            })
            .collect();
        Error::schedule(
            format!("deadlock: {}", sentences.join("; ")),
            "move one of these actions before the one that waits",
        )
    }

    /// Returns the action with the kind that its rank lists: `I` where the backward is split.
    fn as_listed(&self, rank: usize, action: Action) -> Action {
        let split = Action { kind: Kind::InputGradient, ..action };
        if action.kind == Kind::Backward && self.action_lists[rank].contains(&split) { split } else { action }
    }
}

fn check_turn(rank: usize, entry: Action, action: Action, seen: u8) -> Result<()> {
    let Action { kind, stage, micro_batch, .. } = action;
    let needs = match kind {
        Kind::WeightGradient => FORWARD | INPUT,
        Kind::Backward | Kind::InputGradient => FORWARD,
        _ => 0,
    };
    if seen & mark(kind) != 0 {
        return Err(Error::schedule(
            format!("rank {rank} runs `{action}` a second time"),
            "list every action once; a backward is either B, or I and W",
        ));
    }
    if seen & needs != needs {
        let first = if seen & FORWARD == 0 {
            Action::forward(stage, micro_batch)
        } else {
            Action::input_gradient(stage, micro_batch)
        };
        return Err(Error::schedule(
            format!("rank {rank} runs `{entry}` before `{first}`"),
            format!("move `{first}` forward in the order of rank {rank}"),
        ));
    }
    Ok(())
}
