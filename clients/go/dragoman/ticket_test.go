package dragoman

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
)

// The vectors are those of every language.
func TestPromptDigests(t *testing.T) {
	raw, err := os.ReadFile("../../conformance/hashes.json")
	if err != nil {
		t.Skip("clients/conformance is not here: ", err)
	}
	var vectors struct {
		PromptDigests []struct {
			Text     *string  `json:"text"`
			TokenIDs []uint32 `json:"token_ids"`
			Digests  []string `json:"digests"`
			Digest   string   `json:"digest"`
		} `json:"prompt_digests"`
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, vector := range vectors.PromptDigests {
		var digest []byte
		switch {
		case vector.Text != nil:
			digest = digestOfText(*vector.Text)
		case vector.TokenIDs != nil:
			digest = digestOfTokens(vector.TokenIDs)
		default:
			parts := make([][]byte, len(vector.Digests))
			for index, part := range vector.Digests {
				parts[index], _ = hex.DecodeString(part)
			}
			digest = digestOfInputs(parts)
		}
		if hex.EncodeToString(digest) != vector.Digest {
			t.Errorf("%+v: got %x", vector, digest)
		}
	}
}
