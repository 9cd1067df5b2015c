//! The description of a schedule family: source, limits, options and closed forms. [`super::FAMILIES`] lists them all.

use super::Schedule;
use super::request::{Request, Sizes};
use crate::control::Control;
use crate::error::Result;

/// Rule for the number of virtual stages per rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualStages {
    /// A fixed number of virtual stages.
    Exactly(u32),
    /// Any number from 2. The default is 2.
    Several,
    /// Any even number. The default is 2.
    Even,
}

/// Synchronization of the ranks beyond the data that they exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synchronization {
    /// Every iteration ends with a flush: gradients are reduced once, and weights have one version.
    Flush,
    /// No flush: every backward pass is followed by a weight update. A family may keep several weight versions.
    Asynchronous,
    /// Lock-step: all ranks start each step together, and a step takes as long as its slowest rank.
    LockStep,
}

/// Durations for the closed forms: seconds of one micro-batch on one virtual stage, equal for all virtual stages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uniform {
    /// Duration of a forward pass, `F`.
    pub forward_s: f64,
    /// Duration of an input-gradient pass, `I`.
    pub input_gradient_s: f64,
    /// Duration of a weight-gradient pass, `W`.
    pub weight_gradient_s: f64,
    /// Duration of an overlapped pair, `F‖B`.
    pub overlapped_s: f64,
}

impl Uniform {
    /// Returns the duration of a whole backward pass, `B = I + W`.
    #[must_use]
    pub fn backward_s(&self) -> f64 {
        self.input_gradient_s + self.weight_gradient_s
    }
}

/// A schedule family: one row of [`super::FAMILIES`].
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Name of the schedule in the literature.
    pub name: &'static str,
    /// Description in one line.
    pub summary: &'static str,
    /// Publication, or software, that defines the schedule.
    pub source: &'static str,
    /// Condition on the sizes, as text. Empty if every size is valid.
    pub limits: &'static str,
    /// Options of [`Request`] that the family accepts besides the sizes. Other options raise an error, except
    /// durations, which families without a search ignore.
    pub options: &'static [&'static str],
    /// Rule for the number of virtual stages per rank.
    pub virtual_stages_per_rank: VirtualStages,
    /// Copies of the model: 2 for bidirectional schedules that keep two, otherwise 1.
    pub chains: u32,
    /// Whether at least some backward passes are split into `I` and `W`.
    pub splits_backward: bool,
    /// Whether the schedule has backward passes.
    pub trains: bool,
    /// Synchronization of the ranks.
    pub synchronization: Synchronization,
    /// Weight versions that rank `r` keeps, as a formula. Does not count the copies of the model in `chains`.
    pub weight_versions: &'static str,
    /// Largest number of activations of virtual stages that rank `r` holds, as a formula.
    pub peak: &'static str,
    /// Seconds from the first start to the last end in which a rank is idle, as a formula.
    pub bubble: &'static str,
    // The functions below repeat the formulas above in code. Tests check both against built and simulated schedules.
    /// Weight versions of a rank, as a function of the largest number of activations that it holds.
    pub(super) versions_of: fn(u32) -> u32,
    pub(super) peak_of: Option<fn(Sizes, u32) -> u32>,
    pub(super) bubble_of: Option<fn(Sizes, Uniform) -> f64>,
    pub(super) accepts: fn(Sizes) -> bool,
    pub(super) build: fn(Sizes, &Request, &Control) -> Result<Schedule>,
}

impl Family {
    /// Builds the schedule for `request`.
    ///
    /// # Errors
    /// The errors of [`Family::sizes`].
    pub fn build(&self, request: &Request) -> Result<Schedule> {
        self.build_under(request, &Control::default())
    }

    /// Builds the schedule for `request`, unless `control` stops the search. The search takes
    /// long for large schedules.
    ///
    /// # Errors
    /// The errors of [`Family::sizes`], and [`crate::Error::Cancelled`] or [`crate::Error::TimedOut`] if `control`
    /// stopped the search.
    pub fn build_under(&self, request: &Request, control: &Control) -> Result<Schedule> {
        let schedule = (self.build)(self.sizes(request)?, request, control)?;
        if self.synchronization == Synchronization::Flush {
            return Ok(schedule);
        }
        // A micro-batch in flight needs the weights of its forward pass, so the versions follow from the peak.
        let weight_versions = schedule.peak_in_flight().into_iter().map(self.versions_of).collect();
        Ok(Schedule { synchronization: self.synchronization, weight_versions, ..schedule })
    }

    /// Returns the largest number of activations of virtual stages that `rank` holds, by the closed form. `None` if the
    /// family has no closed form.
    #[must_use]
    pub fn peak_in_flight(&self, sizes: Sizes, rank: u32) -> Option<u32> {
        self.peak_of.map(|peak| peak(sizes, rank))
    }

    /// Returns the seconds from the first start to the last end in which a rank is idle, by the closed form for equal
    /// stages and transfers that take no time. `None` if the family has no closed form.
    #[must_use]
    pub fn bubble_s(&self, sizes: Sizes, uniform: Uniform) -> Option<f64> {
        self.bubble_of.map(|bubble| bubble(sizes, uniform))
    }
}
