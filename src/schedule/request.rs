//! Requests for schedules, and their validation against a family's limits.

use super::MAX_S;
use super::families::{Family, VirtualStages};
use crate::error::{Error, Result};

/// Largest number of actions in a schedule. 200 million actions take 4 GB of memory.
pub const MAX_ACTIONS: u64 = 200_000_000;

/// Parameters of a schedule. Options that the family doesn't accept must stay `None`.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Request {
    /// Number of pipeline ranks, `p`.
    pub ranks: u32,
    /// Number of micro-batches over all chains, `M`.
    pub micro_batches: u32,
    /// Virtual stages per rank, `v`. `None` selects the family's default.
    pub virtual_stages_per_rank: Option<u32>,
    /// Micro-batches that pass through a virtual stage before the rank changes to the next virtual stage, `g`.
    pub group_size: Option<u32>,
    /// Activation limit: largest number of activations of virtual stages that a rank may hold.
    pub activation_limit: Option<u32>,
    /// Number of warm-up forwards of each stage. `None` selects the family's own.
    pub max_in_flight: Option<Vec<u32>>,
    /// Durations of the actions, for families with a search. `None` is one second for each of F, I and W.
    pub durations: Option<Durations>,
}

impl Request {
    /// Creates a request with `ranks` ranks and `micro_batches` micro-batches. All other fields are `None`.
    #[must_use]
    pub const fn new(ranks: u32, micro_batches: u32) -> Self {
        Self {
            ranks,
            micro_batches,
            virtual_stages_per_rank: None,
            group_size: None,
            activation_limit: None,
            max_in_flight: None,
            durations: None,
        }
    }

    /// Returns the requested in-flight limits, checked and clamped to `activation_limit` and the number of
    /// micro-batches. `None` if there are none.
    pub(super) fn max_in_flight(&self, sizes: Sizes) -> Result<Option<Vec<u32>>> {
        let Some(max_in_flight) = &self.max_in_flight else { return Ok(None) };
        if max_in_flight.len() != sizes.ranks as usize {
            return Err(Error::argument(
                format!("`max_in_flight` has {} entries for {} ranks", max_in_flight.len(), sizes.ranks),
                "give the number of warm-up forwards of each rank, for instance 4,3,2,1 for 4 ranks",
            ));
        }
        // Clamp before the checks: a limit above the activation limit or the micro-batches has the effect of the
        // smaller number, and only the effective limits can deadlock.
        let max_in_flight: Vec<u32> = max_in_flight
            .iter()
            .map(|&max_in_flight| max_in_flight.min(sizes.activation_limit).min(sizes.micro_batches))
            .collect();
        if let Some(stage) = max_in_flight.iter().position(|&max_in_flight| max_in_flight == 0) {
            return Err(Error::argument(
                format!("`max_in_flight` of stage {stage} is 0, but a stage holds at least one activation"),
                "set it to 1 or more",
            ));
        }
        if let Some(stage) = max_in_flight.windows(2).position(|pair| pair[0] < pair[1]) {
            return Err(Error::argument(
                format!(
                    "`max_in_flight` of stage {} is {}, but stage {stage} runs only {} forwards before its first \
                     backward: a deadlock",
                    stage + 1,
                    max_in_flight[stage + 1],
                    max_in_flight[stage]
                ),
                "let max_in_flight shrink from stage to stage",
            ));
        }
        Ok(Some(max_in_flight))
    }

    /// Returns the requested durations, or one second for each of F, I and W.
    pub(super) fn durations(&self, sizes: Sizes) -> Result<Durations> {
        let stages = (sizes.ranks * sizes.virtual_stages_per_rank) as usize;
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
                    "give one entry for each stage",
                ));
            }
            if let Some(time_s) = list.iter().find(|time_s| !(0.0..=MAX_S).contains(*time_s)) {
                return Err(Error::argument(
                    format!("`{what}` holds {time_s:?}, but a time is at least 0 and at most {MAX_S:e} seconds"),
                    "correct that entry",
                ));
            }
        }
        Ok(durations.clone())
    }
}

/// Durations of the passes of one micro-batch on each stage of a chain, in seconds.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Durations {
    /// Duration of a forward pass, by stage.
    pub forward_s: Vec<f64>,
    /// Duration of an input-gradient pass, by stage.
    pub input_gradient_s: Vec<f64>,
    /// Duration of a weight-gradient pass, by stage.
    pub weight_gradient_s: Vec<f64>,
    /// Duration of a transfer between neighboring stages on different ranks, in either direction.
    pub transfer_s: f64,
}

/// The sizes of a request, checked against the family's limits and completed with its defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Number of pipeline ranks, `p`.
    pub ranks: u32,
    /// Virtual stages per rank, `v`.
    pub virtual_stages_per_rank: u32,
    /// Number of micro-batches over all chains, `M`.
    pub micro_batches: u32,
    /// Micro-batches per group, `g`.
    pub group_size: u32,
    /// Largest number of activations that a rank may hold.
    pub activation_limit: u32,
}

impl Sizes {
    /// Whether every group is large enough to keep all ranks busy. The interleaved families need this.
    pub(super) fn are_in_groups(self) -> bool {
        // A micro-batch reaches its next virtual stage on a rank p slots later. A group of fewer micro-batches leaves
        // the rank idle until then.
        let last_group = self.micro_batches % self.group_size;
        self.group_size >= self.ranks.min(self.micro_batches) && (last_group == 0 || last_group >= self.ranks)
    }
}

impl Family {
    /// Checks `request` against the family's limits and fills in its defaults.
    ///
    /// # Errors
    /// [`Error::Argument`] if a number is 0, the family doesn't accept an option, a limit is violated, or the schedule
    /// would have more than [`MAX_ACTIONS`] actions.
    pub fn sizes(&self, request: &Request) -> Result<Sizes> {
        let name = self.name;
        self.check_options(request)?;
        let Request { ranks, micro_batches, .. } = *request;
        let virtual_stages_per_rank = match (self.virtual_stages_per_rank, request.virtual_stages_per_rank) {
            (VirtualStages::Exactly(virtual_stages_per_rank), None) => virtual_stages_per_rank,
            (VirtualStages::Several | VirtualStages::Even, None) => 2,
            (VirtualStages::Several, Some(virtual_stages_per_rank)) if virtual_stages_per_rank >= 2 => {
                virtual_stages_per_rank
            }
            (VirtualStages::Even, Some(virtual_stages_per_rank)) if virtual_stages_per_rank.is_multiple_of(2) => {
                virtual_stages_per_rank
            }
            (VirtualStages::Exactly(own), Some(virtual_stages_per_rank)) if own == virtual_stages_per_rank => {
                virtual_stages_per_rank
            }
            (kind, Some(virtual_stages_per_rank)) => {
                let wanted = match kind {
                    VirtualStages::Exactly(own) => own.to_string(),
                    VirtualStages::Several => "2 or more".to_owned(),
                    VirtualStages::Even => "an even number of".to_owned(),
                };
                return Err(Error::argument(
                    format!(
                        "`virtual_stages_per_rank` is {virtual_stages_per_rank}, but `{name}` has {wanted} per rank"
                    ),
                    "leave `virtual_stages_per_rank` out, or choose another schedule",
                ));
            }
        };
        let kinds = if self.splits_backward { 3 } else { 2 };
        // Check the size before anything is allocated. Multiplying four 32-bit numbers may overflow
        // 64 bits.
        let actions = [virtual_stages_per_rank, micro_batches, kinds]
            .iter()
            .try_fold(u64::from(ranks), |n, &k| n.checked_mul(k.into()));
        if actions.is_none_or(|actions| actions > MAX_ACTIONS) {
            let size = actions.map_or_else(|| "more than 10^19".to_owned(), |actions| actions.to_string());
            return Err(Error::argument(
                format!(
                    "`{name}` of {ranks} ranks, {virtual_stages_per_rank} virtual stage(s) and \
                     {micro_batches} micro-batches has {size} actions"
                ),
                format!("reduce micro-batches, virtual stages or ranks until there are at most {MAX_ACTIONS} actions"),
            ));
        }
        let group_size = match request.group_size {
            None => min_group(ranks, micro_batches),
            Some(group) => group,
        };
        let sizes = Sizes {
            ranks,
            virtual_stages_per_rank,
            micro_batches,
            group_size,
            activation_limit: request.activation_limit.unwrap_or(u32::MAX),
        };
        if !(self.accepts)(sizes) {
            // Show g only where the user can set it. Other families ignore it.
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
            ("virtual_stages_per_rank", request.virtual_stages_per_rank),
            ("group_size", request.group_size),
            ("activation_limit", request.activation_limit),
        ];
        if let Some((what, _)) = numbers.iter().find(|(_, number)| *number == Some(0)) {
            return Err(Error::argument(format!("`{what}` is 0"), "it must be at least 1"));
        }
        let given = [
            ("group_size", request.group_size.is_some()),
            ("activation_limit", request.activation_limit.is_some()),
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

/// Returns the smallest group size that divides `micro_batches` and keeps all ranks busy.
fn min_group(ranks: u32, micro_batches: u32) -> u32 {
    // The smallest group holds the fewest activations: the warm-up grows by g for each virtual stage after the first.
    (ranks..=micro_batches).find(|&group| micro_batches.is_multiple_of(group)).unwrap_or(micro_batches)
}
