//! What was delivered of one generation, choice by choice: the cursors, and the state that a resume sends. Pure.

use crate::results::{Choice, Token, TokenLogprob, finish_reason_of, logprobs_of};
use crate::v1::{self, choice_finish::Stop};

#[derive(Debug, Default)]
struct Delivered {
    token_ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprob>,
    finish: Option<v1::ChoiceFinish>,
}

/// Owner of the delivered tokens of one generation.
#[derive(Debug)]
pub(crate) struct Progress {
    choices: Vec<Delivered>,
}

impl Progress {
    pub(crate) fn new(num_choices: u32) -> Self {
        Self {
            choices: (0..num_choices.max(1)).map(|_| Delivered::default()).collect(),
        }
    }

    /// Tokens delivered over all choices.
    pub(crate) fn num_tokens(&self) -> u64 {
        self.choices.iter().map(|choice| choice.token_ids.len() as u64).sum()
    }

    /// Whether every choice has ended.
    pub(crate) fn complete(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// The delta as an item of the stream, or `None` when all of it was delivered before.
    ///
    /// Fails, and takes nothing, when it leaves tokens out, overlaps in part (its text cannot be cut), comes after the end of its
    /// choice, or is of a choice that was not asked for.
    pub(crate) fn take(&mut self, delta: v1::GenerationDelta) -> Result<Option<Token>, String> {
        let number = delta.choice_index;
        let Some(choice) = self.choices.get_mut(number as usize) else {
            return Err(format!("choice {number} was not asked for"));
        };
        let expected = choice.token_ids.len() as u64;
        let end = delta.cursor.saturating_add(delta.token_ids.len() as u64);
        if end <= expected && (delta.cursor < expected || choice.finish.is_some()) {
            return Ok(None);
        }
        if delta.cursor != expected {
            return Err(format!(
                "choice {number}: cursor {} came where {expected} is next",
                delta.cursor
            ));
        }
        if choice.finish.is_some() {
            return Err(format!("choice {number}: tokens came after its end"));
        }
        let logprobs = logprobs_of(delta.logprobs);
        choice.token_ids.extend_from_slice(&delta.token_ids);
        choice.text.push_str(&delta.text);
        choice.logprobs.extend_from_slice(&logprobs);
        let finish_reason = delta.finish.as_ref().map(|finish| finish_reason_of(finish.reason));
        choice.finish = delta.finish;
        Ok(Some(Token {
            text: delta.text,
            token_ids: delta.token_ids,
            cursor: expected,
            choice: number,
            logprobs,
            finish_reason,
        }))
    }

    /// What the next agent needs to go on exactly where the last one was cut.
    pub(crate) fn resume_state(&self, attempt: u32, origin_epoch: u64, seed: u64) -> v1::ResumeState {
        let one = |(index, choice): (usize, &Delivered)| v1::ChoiceProgress {
            choice_index: index as u32,
            token_ids: Some(v1::TokenIds {
                ids: choice.token_ids.clone(),
            }),
            finish: choice.finish.clone(),
        };
        v1::ResumeState {
            attempt,
            origin_epoch,
            seed,
            choices: self.choices.iter().enumerate().map(one).collect(),
        }
    }

    /// The outputs. To be called when `complete`.
    pub(crate) fn into_choices(self) -> Vec<Choice> {
        self.choices.into_iter().map(choice_of).collect()
    }
}

fn choice_of(delivered: Delivered) -> Choice {
    let finish = delivered.finish.unwrap_or_default();
    let finish_reason = finish_reason_of(finish.reason);
    let (stop_string, stop_token_id) = match finish.stop {
        Some(Stop::StopString(text)) => (Some(text), None),
        Some(Stop::StopTokenId(token_id)) => (None, Some(token_id)),
        None => (None, None),
    };
    Choice {
        text: delivered.text,
        token_ids: delivered.token_ids,
        finish_reason,
        stop_string,
        stop_token_id,
        logprobs: delivered.logprobs,
    }
}

#[cfg(test)]
mod tests;
