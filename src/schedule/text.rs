//! Schedules as text in PyTorch's notation: `2F0 3I1 0W4 1B2 (0F7;7B3)OVERLAP_F_B`.
//!
//! Each line is a rank. Commas or blanks separate the actions, and an empty cell is a bubble. The parser also reads
//! actions that move data (`2SEND_F0`, `3RECV_F0`, `2SEND_B0`, `1RECV_B0`), wait for it (`2WAIT_SEND_F0`,
//! `2WAIT_SEND_B0`) or handle parameters (`0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`, `0WAIT_REDUCE_GRAD`). A [`Schedule`]
//! keeps only the computations, because the placement of stages determines all transfers.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::{Action, Kind, Schedule, Synchronization, to_u32};
use crate::error::{Error, Result};

/// One action in a line of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// A computation that the rank runs.
    Compute(Action),
    /// `SEND_F`, `RECV_F`, `SEND_B` or `RECV_B` of a micro-batch.
    Transfer {
        /// Stage that sends or receives.
        stage: u32,
        /// Whether the stage sends (`SEND`) or receives (`RECV`).
        send: bool,
        /// Whether the data is an activation (`F`) or a gradient (`B`).
        forward: bool,
        /// Micro-batch of the data.
        micro_batch: u32,
    },
    /// `WAIT_SEND_F` or `WAIT_SEND_B`: waits until a send has completed.
    Wait {
        /// Stage that has sent the data.
        stage: u32,
        /// Whether the data is an activation (`F`) or a gradient (`B`).
        forward: bool,
        /// Micro-batch of the data.
        micro_batch: u32,
    },
    /// `UNSHARD`, `RESHARD`, `REDUCE_GRAD` or `WAIT_REDUCE_GRAD` of a stage's parameters.
    Parameters {
        /// Stage that holds the parameters.
        stage: u32,
        /// Operation on the parameters.
        what: Parameters,
    },
}

/// Operations on the parameters of a stage under sharded data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameters {
    /// All-gathers the parameters before they are used.
    Unshard,
    /// Frees the gathered parameters after they were used.
    Reshard,
    /// Starts the reduction of gradients over the replicas.
    ReduceGrad,
    /// Waits until the reduction of gradients has completed.
    WaitReduceGrad,
}

impl fmt::Display for Entry {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Compute(action) => action.fmt(out),
            Self::Transfer { stage, send, forward, micro_batch } => {
                let (what, of) = (if send { "SEND" } else { "RECV" }, if forward { 'F' } else { 'B' });
                write!(out, "{stage}{what}_{of}{micro_batch}")
            }
            Self::Wait { stage, forward, micro_batch } => {
                write!(out, "{stage}WAIT_SEND_{}{micro_batch}", if forward { 'F' } else { 'B' })
            }
            Self::Parameters { stage, what } => {
                let what = match what {
                    Parameters::Unshard => "UNSHARD",
                    Parameters::Reshard => "RESHARD",
                    Parameters::ReduceGrad => "REDUCE_GRAD",
                    Parameters::WaitReduceGrad => "WAIT_REDUCE_GRAD",
                };
                write!(out, "{stage}{what}")
            }
        }
    }
}

impl FromStr for Entry {
    type Err = Error;

    /// ```
    /// use hpgo::schedule::Entry;
    ///
    /// for text in ["2F0", "(0F7;7B3)OVERLAP_F_B", "2SEND_F0", "2WAIT_SEND_B1", "0WAIT_REDUCE_GRAD"] {
    ///     assert_eq!(text.parse::<Entry>()?.to_string(), text);
    /// }
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        parse(text).ok_or_else(|| {
            Error::schedule(
                format!("`{}` is not an action", text.chars().take(40).collect::<String>()),
                "write stage, kind and micro-batch as in `2F0`, `2B0`, `2I0`, `2W0` or `(0F7;7B3)OVERLAP_F_B`",
            )
        })
    }
}

fn parse(text: &str) -> Option<Entry> {
    if let Some(pair) = text.strip_prefix('(') {
        let (forward, backward) = pair.strip_suffix(")OVERLAP_F_B")?.split_once(';')?;
        let (Entry::Compute(forward), Entry::Compute(backward)) = (parse(forward)?, parse(backward)?) else {
            return None;
        };
        let fits = forward.kind == Kind::Forward && backward.kind == Kind::Backward;
        let pair = Action::overlapped((forward.stage, forward.micro_batch), (backward.stage, backward.micro_batch));
        return fits.then_some(Entry::Compute(pair));
    }
    let (stage, rest) = text.split_at(text.find(|letter: char| !letter.is_ascii_digit())?);
    let (what, micro_batch) = rest.split_at(rest.find(|letter: char| letter.is_ascii_digit()).unwrap_or(rest.len()));
    let stage = stage.parse().ok()?;
    let parameters = match what {
        "UNSHARD" => Some(Parameters::Unshard),
        "RESHARD" => Some(Parameters::Reshard),
        "REDUCE_GRAD" => Some(Parameters::ReduceGrad),
        "WAIT_REDUCE_GRAD" => Some(Parameters::WaitReduceGrad),
        _ => None,
    };
    if let Some(what) = parameters {
        return micro_batch.is_empty().then_some(Entry::Parameters { stage, what });
    }
    let micro_batch = micro_batch.parse().ok()?;
    let transfer = |send, forward| Some(Entry::Transfer { stage, send, forward, micro_batch });
    let compute = |kind| Some(Entry::Compute(Action::new(kind, stage, micro_batch)));
    match what {
        "F" => compute(Kind::Forward),
        "B" => compute(Kind::Backward),
        "I" => compute(Kind::InputGradient),
        "W" => compute(Kind::WeightGradient),
        "SEND_F" => transfer(true, true),
        "RECV_F" => transfer(false, true),
        "SEND_B" => transfer(true, false),
        "RECV_B" => transfer(false, false),
        "WAIT_SEND_F" => Some(Entry::Wait { stage, forward: true, micro_batch }),
        "WAIT_SEND_B" => Some(Entry::Wait { stage, forward: false, micro_batch }),
        _ => None,
    }
}

impl Schedule {
    /// Reads a schedule with one line per rank, and checks that it can run.
    ///
    /// A stage belongs to the rank whose line names it. If the stages form runs of equal length and each run has
    /// micro-batches of its own, each run becomes a chain.
    ///
    /// ```
    /// use hpgo::schedule::Schedule;
    ///
    /// let schedule = Schedule::from_text("mine", "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n")?;
    /// assert_eq!(schedule.to_text(), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
    /// # Ok::<(), hpgo::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Schedule`] with the line of an invalid action, with a stage that is on no rank or on two ranks, or with
    /// the error of [`Schedule::validate`].
    pub fn from_text(name: &str, text: &str) -> Result<Self> {
        let lines: Vec<&str> = text.trim_end().lines().collect();
        let action_lists =
            lines.iter().enumerate().map(|(rank, line)| read_line(rank, line)).collect::<Result<Vec<_>>>()?;
        let rank_of_stage = place(&action_lists)?;
        let ranges = ranges(&action_lists, rank_of_stage.len());
        // The text does not name chains. Recover them from the micro-batches: neighboring stages of one chain run the
        // same ones.
        let runs: Vec<&[Range<u32>]> = ranges.chunk_by(|one, next| one == next).collect();
        let chains: Vec<Range<u32>> = runs.iter().map(|run| run[0].clone()).collect();
        let mut in_order = chains.clone();
        in_order.sort_unstable_by_key(|range| range.start);
        let are_apart = runs.len() > 1
            && runs.iter().all(|run| run.len() == runs[0].len())
            && in_order.windows(2).all(|pair| pair[0].end <= pair[1].start);
        // Otherwise assume one chain. If an action is missing, the ranges differ by accident, and the validation below
        // reports it.
        let micro_batches = if are_apart {
            chains
        } else {
            std::iter::once(0..ranges.iter().map(|range| range.end).max().unwrap_or(0)).collect()
        };
        let schedule = Self {
            name: name.to_owned(),
            stages_per_pipeline: to_u32(rank_of_stage.len() / micro_batches.len()),
            micro_batches,
            rank_of_stage,
            weight_versions: vec![1; action_lists.len()],
            action_lists,
            synchronization: Synchronization::Flush,
        };
        schedule.validate()?;
        Ok(schedule)
    }

    /// Formats the schedule with one line per rank, and commas between the actions.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.action_lists.iter().map(|order| join(order.iter()) + "\n").collect()
    }

    /// Formats the schedule like [`Schedule::to_text`], with an empty cell in each step in which a rank waits. Every
    /// action takes one step.
    ///
    /// Column `t` of all lines shows the actions of step `t`.
    ///
    /// # Errors
    /// The errors of [`Schedule::validate`].
    pub fn to_text_in_steps(&self) -> Result<String> {
        self.validate()?;
        Ok(self
            .steps()
            .iter()
            .zip(&self.action_lists)
            .map(|(steps, order)| {
                let mut line = String::new();
                let mut column = 0;
                for (step, action) in steps.iter().zip(order) {
                    (column..*step).for_each(|_| line.push(','));
                    column = *step;
                    line += &action.to_string();
                }
                line + "\n"
            })
            .collect())
    }

    /// Returns the step in which each action runs, by rank, if every action takes one step. The schedule must be valid.
    fn steps(&self) -> Vec<Vec<usize>> {
        let width = self.micro_batches.iter().map(|range| range.end).max().unwrap_or(0) as usize;
        // Entries hold the step plus one, so that 0 can mean "has not run".
        let mut forward = vec![0; width * self.rank_of_stage.len()];
        let mut backward = forward.clone();
        let at = |stage: u32, micro_batch: u32| stage as usize * width + micro_batch as usize;
        let mut steps: Vec<Vec<usize>> =
            self.action_lists.iter().map(|order| Vec::with_capacity(order.len())).collect();
        let total = self.action_count();
        let mut run = 0;
        // A valid schedule has no deadlock, so each pass over the ranks runs at least one action and the loop ends.
        while run < total {
            for (order, steps) in self.action_lists.iter().zip(&mut steps) {
                while let Some(entry) = order.get(steps.len()) {
                    // An overlapped pair starts when the inputs of both its passes are available.
                    let ready = entry.halves().try_fold(0, |latest, action| {
                        let Action { kind, stage, micro_batch, .. } = action;
                        let place = stage % self.stages_per_pipeline;
                        let needed = match kind {
                            Kind::Forward if place > 0 => forward[at(stage - 1, micro_batch)],
                            Kind::Backward | Kind::InputGradient if place + 1 < self.stages_per_pipeline => {
                                backward[at(stage + 1, micro_batch)]
                            }
                            _ => return Some(latest),
                        };
                        (needed > 0).then_some(latest.max(needed))
                    });
                    let Some(ready) = ready else { break };
                    let step = ready.max(steps.last().map_or(0, |last| last + 1));
                    for action in entry.halves() {
                        match action.kind {
                            Kind::Forward => forward[at(action.stage, action.micro_batch)] = step + 1,
                            // No other action waits for a weight gradient.
                            Kind::WeightGradient => {}
                            _ => backward[at(action.stage, action.micro_batch)] = step + 1,
                        }
                    }
                    steps.push(step);
                    run += 1;
                }
            }
        }
        steps
    }
}

fn join<T: ToString>(entries: impl Iterator<Item = T>) -> String {
    entries.map(|entry| entry.to_string()).collect::<Vec<_>>().join(",")
}

fn read_line(rank: usize, line: &str) -> Result<Vec<Action>> {
    let cells = line.split(|letter: char| letter == ',' || letter.is_whitespace()).filter(|cell| !cell.is_empty());
    cells
        .filter_map(|cell| match cell.trim_matches('"').parse() {
            Ok(Entry::Compute(action)) => Some(Ok(action)),
            Ok(_) => None,
            Err(Error::Schedule { message, hint }) => {
                Some(Err(Error::Schedule { message: format!("line {}: {message}", rank + 1), hint }))
            }
            Err(other) => Some(Err(other)),
        })
        .collect()
}

/// Returns the rank of each stage: the line that names the stage.
fn place(action_lists: &[Vec<Action>]) -> Result<Vec<u32>> {
    let actions = action_lists.iter().flatten().flat_map(|entry| entry.halves());
    let stages = actions.map(|action| action.stage as usize + 1).max().unwrap_or(0);
    let entries: usize = action_lists.iter().map(Vec::len).sum();
    // Check before the allocation: one wrong number in a file may claim 2^32 stages. Each action names at most two.
    if stages == 0 || stages > 2 * entries {
        return Err(Error::schedule(
            format!("{entries} action(s) name {stages} stages"),
            "number stages from 0 without a gap, and list at least one action of each",
        ));
    }
    let mut ranks = vec![None; stages];
    for (rank, order) in action_lists.iter().enumerate() {
        for action in order.iter().flat_map(|entry| entry.halves()) {
            let owner = ranks[action.stage as usize].get_or_insert(rank);
            if *owner != rank {
                return Err(Error::schedule(
                    format!("stage {} is on rank {owner} and on rank {rank}, which runs `{action}`", action.stage),
                    "keep each stage on one line",
                ));
            }
        }
    }
    let missing = ranks.iter().position(Option::is_none);
    ranks.into_iter().map(|rank| rank.map(to_u32)).collect::<Option<_>>().ok_or_else(|| {
        Error::schedule(
            format!("no rank runs stage {}", missing.unwrap_or(0)),
            "number stages from 0 without a gap, and list at least one action of each",
        )
    })
}

/// Returns the range of micro-batches that each stage runs.
fn ranges(action_lists: &[Vec<Action>], stages: usize) -> Vec<Range<u32>> {
    let none = Range { start: u32::MAX, end: 0 };
    let mut ranges = vec![none; stages];
    for action in action_lists.iter().flatten().flat_map(|entry| entry.halves()) {
        let range = &mut ranges[action.stage as usize];
        range.start = range.start.min(action.micro_batch);
        range.end = range.end.max(action.micro_batch.saturating_add(1));
    }
    ranges
}
