# Writes OUT, C++ that defines stratagem::config_schema_text(), from the text file IN.
file(READ ${IN} text)
file(WRITE ${OUT} "#include \"libstratagem/config/config.hpp\"
namespace stratagem {
const std::string& config_schema_text() {
  static const std::string text = R\"schema(${text})schema\";
  return text;
}
}  // namespace stratagem
")
