//! What a schedule is asked for, and whether a family can give it.

use super::LONGEST_S;
use super::families::{Chunks, Family};
use crate::error::{Error, Result};

/// Larger schedules are refused: 200 million actions are 4 GB.
pub const MOST_ACTIONS: u64 = 200_000_000;

/// What a schedule is asked for. Options that the family doesn't take must stay `None`.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Request {
    /// Number of ranks, `p`.
    pub ranks: u32,
    /// Number of micro-batches over all chains, `M`.
    pub micro_batches: u32,
    /// Chunks a rank, `v`; `None` is the family's own number.
    pub chunks: Option<u32>,
    /// Micro-batches that pass through a chunk before the next chunk's turn, `g`.
    pub group_size: Option<u32>,
    /// Most activations a rank may hold, in chunks.
    pub cap: Option<u32>,
    /// Warm-up forwards of each stage, in place of the family's own.
    pub max_in_flight: Option<Vec<u32>>,
    /// How long actions take, for the families that look; `None` is one second for each of F, I and W.
    pub durations: Option<Durations>,
}

impl Request {
    /// `ranks` ranks, `micro_batches` micro-batches, all else as the family has it.
    #[must_use]
    pub const fn new(ranks: u32, micro_batches: u32) -> Self {
        Self { ranks, micro_batches, chunks: None, group_size: None, cap: None, max_in_flight: None, durations: None }
    }

    /// The windows asked for, if any, checked and capped.
    pub(super) fn max_in_flight(&self, sizes: Sizes) -> Result<Option<Vec<u32>>> {
        let Some(max_in_flight) = &self.max_in_flight else { return Ok(None) };
        if max_in_flight.len() != sizes.ranks as usize {
            return Err(Error::argument(
                format!("`max_in_flight` has {} entries for {} ranks", max_in_flight.len(), sizes.ranks),
                "give the number of warm-up forwards of each rank",
            ));
        }
        let max_in_flight: Vec<u32> =
            max_in_flight.iter().map(|&max_in_flight| max_in_flight.min(sizes.cap).min(sizes.micro_batches)).collect();
        if let Some(stage) = max_in_flight.iter().position(|&max_in_flight| max_in_flight == 0) {
            return Err(Error::argument(
                format!("`max_in_flight` of stage {stage} is 0"),
                "a stage holds at least one activation",
            ));
        }
        if let Some(stage) = max_in_flight.windows(2).position(|pair| pair[0] < pair[1]) {
            return Err(Error::argument(
                format!(
                    "`max_in_flight` deadlocks: stage {} wants {} forwards before its first backward, stage {stage} gives it {}",
                    stage + 1,
                    max_in_flight[stage + 1],
                    max_in_flight[stage]
                ),
                "let max_in_flight shrink from stage to stage",
            ));
        }
        Ok(Some(max_in_flight))
    }

    /// The durations asked for, or one second for each of F, I and W.
    pub(super) fn durations(&self, sizes: Sizes) -> Result<Durations> {
        let stages = (sizes.ranks * sizes.chunks) as usize;
        let Some(durations) = &self.durations else {
            let one = vec![1.0; stages];
            return Ok(Durations {
                forward_s: one.clone(),
                input_gradient_s: one.clone(),
                weight_gradient_s: one,
                transfer_s: 0.0,
            });
        };
        let Durations { forward_s, input_gradient_s, weight_gradient_s, transfer_s } = durations;
        for (what, list) in [
            ("forward_s", forward_s),
            ("input_gradient_s", input_gradient_s),
            ("weight_gradient_s", weight_gradient_s),
            ("transfer_s", &vec![*transfer_s; stages]),
        ] {
            if list.len() != stages {
                return Err(Error::argument(
                    format!("`{what}` has {} entries for {stages} stages", list.len()),
                    "give one for each stage",
                ));
            }
            if let Some(time_s) = list.iter().find(|time_s| !(0.0..=LONGEST_S).contains(*time_s)) {
                return Err(Error::argument(
                    format!("`{what}` holds {time_s:?}"),
                    format!("times are numbers of seconds from 0 to {LONGEST_S:e}"),
                ));
            }
        }
        Ok(durations.clone())
    }
}

/// Seconds of one micro-batch on each stage of a chain.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Durations {
    /// Forward of each stage.
    pub forward_s: Vec<f64>,
    /// Input gradient of each stage.
    pub input_gradient_s: Vec<f64>,
    /// Weight gradient of each stage.
    pub weight_gradient_s: Vec<f64>,
    /// From a stage to the next, or back.
    pub transfer_s: f64,
}

/// A request's numbers, checked against a family's limits and filled with its defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Ranks, `p`.
    pub ranks: u32,
    /// Chunks a rank, `v`.
    pub chunks: u32,
    /// Micro-batches, `M`.
    pub micro_batches: u32,
    /// Micro-batches in a group, `g`.
    pub group_size: u32,
    /// Most activations a rank may hold.
    pub cap: u32,
}

impl Sizes {
    /// Whether every group keeps all ranks busy: as the interleaved families need it.
    pub(super) fn are_in_groups(self) -> bool {
        let last_group = self.micro_batches % self.group_size;
        self.group_size >= self.ranks.min(self.micro_batches) && (last_group == 0 || last_group >= self.ranks)
    }
}

impl Family {
    /// Checks `request` against the limits and fills in what it leaves open.
    ///
    /// # Errors
    /// [`Error::Argument`] if a number is 0, an option isn't this family's, a limit is broken, or the schedule would
    /// have more than [`MOST_ACTIONS`] actions.
    pub fn sizes(&self, request: &Request) -> Result<Sizes> {
        let name = self.name;
        self.check_options(request)?;
        let Request { ranks, micro_batches, .. } = *request;
        let chunks = match (self.chunks, request.chunks) {
            (Chunks::Exactly(chunks), None) => chunks,
            (Chunks::Several | Chunks::Even, None) => 2,
            (Chunks::Several, Some(chunks)) if chunks >= 2 => chunks,
            (Chunks::Even, Some(chunks)) if chunks.is_multiple_of(2) => chunks,
            (Chunks::Exactly(own), Some(chunks)) if own == chunks => chunks,
            (kind, Some(chunks)) => {
                let wanted = match kind {
                    Chunks::Exactly(own) => own.to_string(),
                    Chunks::Several => "2 or more".to_owned(),
                    Chunks::Even => "an even number of".to_owned(),
                };
                return Err(Error::argument(
                    format!("`{name}` was asked for {chunks} chunk(s) a rank but has {wanted}"),
                    "leave `chunks` out, or choose another schedule",
                ));
            }
        };
        let kinds = if self.splits_backward { 3 } else { 2 };
        let actions = [chunks, micro_batches, kinds].iter().try_fold(u64::from(ranks), |n, &k| n.checked_mul(k.into()));
        if actions.is_none_or(|actions| actions > MOST_ACTIONS) {
            let size = actions.map_or_else(|| "more than 10^19".to_owned(), |actions| actions.to_string());
            return Err(Error::argument(
                format!(
                    "`{name}` of {ranks} ranks, {chunks} chunk(s) and {micro_batches} micro-batches has {size} actions"
                ),
                format!("at most {MOST_ACTIONS} are allowed: ask for fewer micro-batches, chunks or ranks"),
            ));
        }
        let group_size = match request.group_size {
            None => smallest_group(ranks, micro_batches),
            Some(group) => group,
        };
        let sizes = Sizes { ranks, chunks, micro_batches, group_size, cap: request.cap.unwrap_or(u32::MAX) };
        if !(self.accepts)(sizes) {
            let in_groups = self.options.contains(&"group_size");
            let group = if in_groups { format!(", g = {group_size}") } else { String::new() };
            return Err(Error::argument(
                format!("`{name}` can't have p = {ranks} ranks and M = {micro_batches} micro-batches{group}"),
                format!("it needs {}", self.limits),
            ));
        }
        Ok(sizes)
    }

    fn check_options(&self, request: &Request) -> Result<()> {
        let Self { name, options, .. } = self;
        let numbers = [
            ("ranks", Some(request.ranks)),
            ("micro_batches", Some(request.micro_batches)),
            ("chunks", request.chunks),
            ("group_size", request.group_size),
            ("cap", request.cap),
        ];
        if let Some((what, _)) = numbers.iter().find(|(_, number)| *number == Some(0)) {
            return Err(Error::argument(format!("`{what}` is 0"), "it must be at least 1"));
        }
        let given = [
            ("group_size", request.group_size.is_some()),
            ("cap", request.cap.is_some()),
            ("max_in_flight", request.max_in_flight.is_some()),
        ];
        match given.iter().find(|(option, given)| *given && !options.contains(option)) {
            Some((option, _)) => Err(Error::argument(
                format!("`{name}` has no option `{option}`"),
                if options.is_empty() {
                    "leave it out".to_owned()
                } else {
                    format!("it takes `{}`", options.join("`, `"))
                },
            )),
            None => Ok(()),
        }
    }
}

/// The smallest group that divides `micro_batches` and keeps all ranks busy.
fn smallest_group(ranks: u32, micro_batches: u32) -> u32 {
    (ranks..=micro_batches).find(|&group| micro_batches.is_multiple_of(group)).unwrap_or(micro_batches)
}
