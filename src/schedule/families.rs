//! Schedule families: what each is, where it comes from, its limits and its closed forms. [`super::FAMILIES`] lists them.

use super::Schedule;
use super::request::{Request, Sizes};
use crate::control::Control;
use crate::error::Result;

/// How many chunks a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    /// Always this many.
    Exactly(u32),
    /// Two unless asked for another number from two on.
    Several,
    /// Two unless asked for another even number.
    Even,
}

/// What ranks wait for beyond the data they exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Every iteration ends with a flush: gradients are synchronised once, weights have one version.
    Flush,
    /// No flush: weights are updated after every backward, and several versions of them are kept.
    Asynchronous,
    /// All ranks step together; a step takes as long as its slowest rank.
    LockStep,
}

/// Seconds of one micro-batch on any chunk, for the closed forms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Uniform {
    /// `F`.
    pub forward_s: f64,
    /// `I`.
    pub input_gradient_s: f64,
    /// `W`.
    pub weight_gradient_s: f64,
    /// `F‖B`.
    pub overlapped_s: f64,
}

impl Uniform {
    /// `B = I + W`.
    #[must_use]
    pub fn backward_s(&self) -> f64 {
        self.input_gradient_s + self.weight_gradient_s
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The field's name for it.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: &'static str,
    /// Where it was published.
    pub source: &'static str,
    /// What it asks of the sizes; empty if nothing.
    pub limits: &'static str,
    /// Options of [`Request`] that it takes besides the sizes; others are refused, but durations are never wrong.
    pub options: &'static [&'static str],
    /// Chunks a rank.
    pub chunks: Chunks,
    /// Copies of the model: two where micro-batches flow both ways.
    pub chains: u32,
    /// Whether its backwards are `I` and `W`, at least in part.
    pub splits_backward: bool,
    /// Whether there are backwards at all.
    pub trains: bool,
    /// What ranks wait for.
    pub pace: Pace,
    /// Versions of the weights that rank `r` keeps, as a formula. Copies of the model are counted by `chains`.
    pub weight_versions: &'static str,
    /// Most chunk activations that rank `r` holds, as a formula.
    pub peak: &'static str,
    /// Seconds from start to end that a rank is not busy, as a formula.
    pub bubble: &'static str,
    /// The same, from the most activations that the rank holds.
    pub(super) versions_of: fn(u32) -> u32,
    pub(super) peak_of: Option<fn(Sizes, u32) -> u32>,
    pub(super) bubble_of: Option<fn(Sizes, Uniform) -> f64>,
    pub(super) accepts: fn(Sizes) -> bool,
    pub(super) build: fn(Sizes, &Request, &Control) -> Result<Schedule>,
}

impl Family {
    /// The schedule for `request`.
    ///
    /// # Errors
    /// As [`Family::sizes`].
    pub fn build(&self, request: &Request) -> Result<Schedule> {
        self.build_under(request, &Control::default())
    }

    /// The schedule for `request`, unless `control` stops it: those that are searched for take long if they are large.
    ///
    /// # Errors
    /// As [`Family::sizes`]; [`crate::Error::Cancelled`] or [`crate::Error::TimedOut`] if it was stopped.
    pub fn build_under(&self, request: &Request, control: &Control) -> Result<Schedule> {
        let schedule = (self.build)(self.sizes(request)?, request, control)?;
        if self.pace == Pace::Flush {
            return Ok(schedule);
        }
        let weight_versions = schedule.peak_in_flight().into_iter().map(self.versions_of).collect();
        Ok(Schedule { pace: self.pace, weight_versions, ..schedule })
    }

    /// Most chunk activations that `rank` holds, by the closed form; `None` if there is none.
    #[must_use]
    pub fn peak_in_flight(&self, sizes: Sizes, rank: u32) -> Option<u32> {
        self.peak_of.map(|peak| peak(sizes, rank))
    }

    /// Seconds that a rank is not busy from the first start to the last end, by the closed form for equal stages and
    /// free transfers; `None` if there is none.
    #[must_use]
    pub fn bubble_s(&self, sizes: Sizes, uniform: Uniform) -> Option<f64> {
        self.bubble_of.map(|bubble| bubble(sizes, uniform))
    }
}
