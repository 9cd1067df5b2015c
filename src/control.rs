//! Progress reports, deadlines and cancellation of long computations.
//!
//! This module does not depend on Python: both the Python bindings and pure Rust code use it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;

/// Progress of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Value of the objective for the best answer so far. Infinite before there is one.
    pub best_s: f64,
    /// Lower bound on the value of every answer.
    pub lower_bound_s: f64,
}

impl Default for Progress {
    fn default() -> Self {
        Self { best_s: f64::INFINITY, lower_bound_s: 0.0 }
    }
}

/// Reason why a search ended before it proved its answer optimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The deadline of the work passed.
    Deadline,
    /// The caller cancelled the search.
    Interrupt,
    /// The search reached its limit on work.
    Effort,
}

/// Part of its progress that a partial search reports to the observer of the whole search.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reports {
    /// Reports the best answer and the bound.
    #[default]
    All,
    /// Reports an answer if it is the best of all parts, but no bound, because the bound holds for this part only.
    Best,
    /// Reports nothing, because its answers are not answers of the whole search.
    Nothing,
}

/// Shared state of the thread that searches and the thread that waits for it.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    /// Number of checks after which the work stops.
    checks: Option<AtomicU64>,
    progress: Arc<Mutex<Progress>>,
    reports: Reports,
}

impl Control {
    /// Creates a control that stops the work after `limit`, or never.
    #[must_use]
    pub fn with_deadline(limit: Option<Duration>) -> Self {
        // A limit beyond the range of the clock counts as none.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        Self { deadline, ..Self::default() }
    }

    /// Creates a control that stops the work after this number of checks. Unlike with a deadline, the result does not
    /// depend on the speed of the machine.
    #[must_use]
    pub fn with_checks(limit: u64) -> Self {
        Self { checks: Some(AtomicU64::new(limit)), ..Self::default() }
    }

    /// Creates the control of a part of this work, which may use this share of the remaining time.
    #[must_use]
    pub fn part(&self, share: f64, reports: Reports) -> Self {
        // The part shares the cancellation flag, so an interrupt ends all parts, while each has its own deadline.
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).mul_f64(share));
        Self {
            cancelled: Arc::clone(&self.cancelled),
            deadline: left.and_then(|left| Instant::now().checked_add(left)),
            checks: None,
            progress: Arc::clone(&self.progress),
            reports,
        }
    }

    /// Asks the work to stop at its next check.
    pub fn cancel(&self) {
        // Relaxed is enough: the flag guards no other data, and a late check only delays the stop.
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns whether the caller cancelled the work. A passed deadline does not count.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Returns whether the work should return what it has: it was cancelled, or its deadline passed.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.stopped().is_some()
    }

    /// Returns why the work should return what it has, or `None` if it should go on. A cancellation takes precedence
    /// over a passed deadline.
    #[must_use]
    pub fn stopped(&self) -> Option<Stopped> {
        if self.is_cancelled() {
            return Some(Stopped::Interrupt);
        }
        if let Some(checks) = &self.checks {
            // Saturating: the work may check again after it was asked to stop.
            let taken = checks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            return taken.is_err().then_some(Stopped::Effort);
        }
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline).then_some(Stopped::Deadline)
    }

    /// Checks that the work may go on. For work that has nothing to return before its end.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] or [`Error::Cancelled`] if the work should stop.
    pub fn check(&self) -> crate::error::Result<()> {
        if self.should_stop() { Err(self.error()) } else { Ok(()) }
    }

    /// Returns the error of work that was stopped before it had anything to return.
    #[must_use]
    pub fn error(&self) -> Error {
        if self.deadline.is_some() && !self.is_cancelled() {
            Error::TimedOut { known: String::new() }
        } else {
            Error::Cancelled
        }
    }

    /// Reports the progress of the work, as far as this part of it reports.
    pub fn report(&self, progress: Progress) {
        // A poisoned lock still holds valid numbers, and a panic elsewhere must not hide the answer.
        let mut shown = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match self.reports {
            Reports::All => *shown = progress,
            Reports::Best => shown.best_s = shown.best_s.min(progress.best_s),
            Reports::Nothing => {}
        }
    }

    /// Returns the progress that was reported last.
    #[must_use]
    pub fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
