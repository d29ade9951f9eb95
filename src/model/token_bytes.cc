#include "src/model/token_bytes.h"

#include <array>
#include <map>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

// Ids are dense but for a few holes, so the table of them is about as long as the list. A stray id
// must not make it longer than twice the list and these entries (2 MiB).
constexpr uint64_t kMaxHoles = 1 << 16;

enum class DecoderKind { kByteLevel, kByteFallback };

// Appends the code point to UTF-8 text. It handles GPT-2's alphabet, which ends at U+0143.
std::string Utf8(uint32_t code) {
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

// Returns GPT-2's alphabet, character -> byte (bytes_to_unicode of its encoder.py). Printable bytes
// stand for themselves; for the others, in order, stand U+0100 and the following.
const std::map<std::string, char>& ByteAlphabet() {
  static const auto* alphabet = [] {
    auto* out = new std::map<std::string, char>;
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                             (byte >= 0xAE && byte <= 0xFF);
      (*out)[Utf8(printable ? byte : next++)] = static_cast<char>(byte);
    }
    return out;
  }();
  return *alphabet;
}

// A token with a character outside the alphabet stands for its own text, as in tokenizers.
std::string ByteLevelBytes(const std::string& token) {
  const auto& alphabet = ByteAlphabet();
  std::string out;
  for (size_t i = 0; i < token.size();) {
    const size_t length = static_cast<uint8_t>(token[i]) < 0x80 ? 1 : 2;
    const auto it = alphabet.find(token.substr(i, length));
    if (it == alphabet.end()) return token;
    out.push_back(it->second);
    i += length;
  }
  return out;
}

std::string ByteFallbackBytes(const std::string& token) {
  uint32_t byte = 0;
  if (token.size() == 6 && token.compare(0, 3, "<0x") == 0 && token[5] == '>' &&
      absl::SimpleHexAtoi(token.substr(3, 2), &byte)) {
    return std::string(1, static_cast<char>(byte));
  }
  return absl::StrReplaceAll(token, {{"\xE2\x96\x81", " "}});  // U+2581
}

void CollectDecoders(const json& decoder, std::set<std::string>* types) {
  if (!decoder.is_object()) return;
  const auto type = decoder.find("type");
  if (type != decoder.end() && type->is_string()) types->insert(type->get<std::string>());
  const auto parts = decoder.find("decoders");
  if (parts == decoder.end() || !parts->is_array()) return;
  for (const json& part : *parts) CollectDecoders(part, types);
}

absl::StatusOr<DecoderKind> FindKind(const std::string& path, const json& root) {
  std::set<std::string> types;
  if (root.contains("decoder")) CollectDecoders(root["decoder"], &types);
  if (types.count("ByteLevel") != 0) return DecoderKind::kByteLevel;
  if (types.count("ByteFallback") != 0) return DecoderKind::kByteFallback;
  types.erase("Sequence");
  return absl::UnimplementedError(
      absl::StrCat(path, ": decoder: expected ByteLevel or ByteFallback, found ",
                   types.empty() ? "none" : Shown(absl::StrJoin(types, ", ")),
                   "; without it stop strings cannot be matched"));
}

absl::Status Add(const std::string& path, const std::string& token, const json& id,
                 DecoderKind kind, uint64_t max_id, std::vector<std::string>* out) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() > max_id) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": token \"", Shown(token), "\"",
                                                   ": expected an id of 0 to ", max_id, ", found ",
                                                   ShownJson(id)));
  }
  const auto index = id.get<size_t>();
  if (index >= out->size()) out->resize(index + 1);
  (*out)[index] =
      kind == DecoderKind::kByteLevel ? ByteLevelBytes(token) : ByteFallbackBytes(token);
  return absl::OkStatus();
}

// Returns the value that stands there, or null.
const json& Vocabulary(const json& root) {
  static const json none;
  const auto model = root.find("model");
  const bool has = model != root.end() && model->is_object() && model->contains("vocab");
  return has ? model->at("vocab") : none;
}

// BPE and WordPiece have {token: id}. Unigram has [[token, score], ...], where the id is the index.
absl::Status AddVocabulary(const std::string& path, const json& root, DecoderKind kind,
                           uint64_t max_id, std::vector<std::string>* out) {
  const json& vocab = Vocabulary(root);
  if (vocab.is_object()) {
    for (const auto& [token, id] : vocab.items()) {
      SLUICE_RETURN_IF_ERROR(Add(path, token, id, kind, max_id, out));
    }
    return absl::OkStatus();
  }
  if (!vocab.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": model.vocab: expected an object or a list, found ",
                     vocab.is_null() ? "nothing" : vocab.type_name()));
  }
  uint64_t id = 0;
  for (const json& entry : vocab) {
    if (!entry.is_array() || entry.empty() || !entry[0].is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": model.vocab[", id, "]: expected [token, score], found ", entry.type_name()));
    }
    SLUICE_RETURN_IF_ERROR(Add(path, entry[0].get<std::string>(), json(id), kind, max_id, out));
    ++id;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenBytes> TokenBytes::Load(const std::string& path) {
  // Merges are most of the file, and only encoding needs them.
  SLUICE_ASSIGN_OR_RETURN(const json root, ReadJsonFile(path, kMaxTokenizerBytes, "merges"));
  SLUICE_ASSIGN_OR_RETURN(const DecoderKind kind, FindKind(path, root));
  TokenBytes out;
  const auto added = root.find("added_tokens");
  const uint64_t tokens = Vocabulary(root).size() + (added == root.end() ? 0 : added->size());
  const uint64_t max_id = 2 * tokens + kMaxHoles;
  SLUICE_RETURN_IF_ERROR(AddVocabulary(path, root, kind, max_id, &out.bytes_));
  if (added == root.end() || added->is_null()) return out;
  if (!added->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": added_tokens: expected a list, found ", added->type_name()));
  }
  for (const json& token : *added) {
    if (!token.is_object() || !token.contains("id") || !token.contains("content") ||
        !token["content"].is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": added_tokens: expected {id, content, ...}, found ", ShownJson(token)));
    }
    SLUICE_RETURN_IF_ERROR(
        Add(path, token["content"].get<std::string>(), token["id"], kind, max_id, &out.bytes_));
  }
  return out;
}

const std::string& TokenBytes::Bytes(int32_t id) const {
  static const auto* none = new std::string;
  return id >= 0 && id < size() ? bytes_[static_cast<size_t>(id)] : *none;
}

}  // namespace sluice
