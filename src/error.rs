//! Errors, with one variant for each kind of input that a user can correct.
//!
//! The message states the value and the rule that it breaks. [`Error::hint`] is an action that corrects it.

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that can't be fulfilled, or that is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The layer graph is not usable: a cycle, an unknown node, or a number out of range.
    #[error("{message}")]
    Profile {
        /// Description of the fault that names the layer and the number.
        message: String,
        /// Action that corrects it.
        hint: String,
    },
    /// The description of nodes, devices or links is not usable.
    #[error("{message}")]
    Cluster {
        /// Description of the fault that names the node and the number.
        message: String,
        /// Action that corrects it.
        hint: String,
    },
    /// An argument is out of its range or contradicts another one.
    #[error("{message}")]
    Argument {
        /// Description of the fault that names the argument and its value.
        message: String,
        /// Action that corrects it.
        hint: String,
    },
    /// The problem is valid, but it has no solution.
    #[error("{message}")]
    Infeasible {
        /// Description of what is missing, where, and how much.
        message: String,
        /// Smallest change that would help.
        hint: String,
    },
    /// A schedule can't be executed: it is incomplete, has actions on a wrong rank, or deadlocks.
    #[error("{message}")]
    Schedule {
        /// The first wrong action, or the cycle of waiting actions.
        message: String,
        /// Action that corrects it.
        hint: String,
    },
    /// The deadline passed before there was anything to return.
    #[error("the time was up before there was any plan{known}")]
    TimedOut {
        /// Knowledge about all plans, as the end of the sentence. May be empty.
        known: String,
    },
    /// The caller cancelled the work before there was anything to return.
    #[error("stopped before an answer was found")]
    Cancelled,
}

impl Error {
    /// Returns an action that the user can take. Empty if there is none.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Profile { hint, .. }
            | Self::Cluster { hint, .. }
            | Self::Argument { hint, .. }
            | Self::Infeasible { hint, .. }
            | Self::Schedule { hint, .. } => hint,
            // Both are the user's choice, so more time is the only action that helps.
            Self::TimedOut { .. } | Self::Cancelled => "give it more time",
        }
    }

    /// Creates an [`Error::Profile`] from a message and a hint.
    pub fn profile(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Profile { message: message.into(), hint: hint.into() }
    }

    /// Creates an [`Error::Cluster`] from a message and a hint.
    pub fn cluster(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Cluster { message: message.into(), hint: hint.into() }
    }

    /// Creates an [`Error::Argument`] from a message and a hint.
    pub fn argument(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Argument { message: message.into(), hint: hint.into() }
    }

    /// Creates an [`Error::Infeasible`] from a message and a hint.
    pub fn infeasible(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Infeasible { message: message.into(), hint: hint.into() }
    }

    /// Creates an [`Error::Schedule`] from a message and a hint.
    pub fn schedule(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Schedule { message: message.into(), hint: hint.into() }
    }
}
